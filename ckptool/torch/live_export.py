"""Hands a live, sharded model to inference: one consolidated export, written by all ranks.

    export_live(model, "s3://bucket/llama8b/hf", dtype="bfloat16")

No rank ever holds the model: parts go through a few buffers, and each rank writes what it
holds. The files are, byte for byte, those that ``ckptool export`` makes of a checkpoint saved
at the same step. A training loop that wants to go on meanwhile keeps a LiveExporter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ckptool.torch.live_exporter import DEFAULT_MAX_MEMORY, LiveExporter
from ckptool.torch.live_report import ExportReport

__all__ = ["ExportReport", "LiveExporter", "export_live"]


def export_live(
    model: nn.Module | Mapping[str, Any],
    destination: str,
    *,
    dtype: str | None = None,
    everything: bool = False,
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
    strip_prefix: str | None = None,
    rename: Mapping[str, str] | None = None,
    max_file_size: int | None = None,
    max_memory: int = DEFAULT_MAX_MEMORY,
    storage_options: Mapping[str, Any] | None = None,
    mode: str = "snapshot",
    rank_by_rank: bool = False,
    beside: Mapping[str, bytes] | None = None,
    process_timeout_s: float = 300.0,
) -> ExportReport:
    """Write a model that lives on these ranks as safetensors; collective.

    ``model`` is a module, which counts as the checkpoint entry ``model``, or a state dict as it
    would be saved. ``destination`` is a folder, or one file that ends in ``.safetensors``, on
    any storage. ``dtype``, ``everything`` (``--all``), ``only``, ``exclude``, ``strip_prefix``,
    ``rename`` and ``max_file_size`` mean what they mean to ``ckptool export``.

    ``max_memory`` bounds the bytes in flight on a rank. ``mode`` "snapshot" copies this rank's
    share of the model to host memory first, and what travels goes over gloo; "stop" reads the
    tensors where they are, and what travels goes from GPU to GPU. ``rank_by_rank``: rank 0
    writes all, in order, from what one rank after the other sends; so it is anyway on storage
    that takes only that. ``beside`` are small files for the same folder.

    Returns once the export is complete. Raises the same error on every rank, and then nothing
    is visible and the model is as it was.
    """
    with LiveExporter(process_timeout_s=process_timeout_s) as exporter:
        report = exporter.export(
            model,
            destination,
            dtype=dtype,
            everything=everything,
            only=only,
            exclude=exclude,
            strip_prefix=strip_prefix,
            rename=rename,
            max_file_size=max_file_size,
            max_memory=max_memory,
            storage_options=storage_options,
            mode=mode,
            rank_by_rank=rank_by_rank,
            beside=beside,
        )
        if report.committed:
            return report
        exporter.wait()
        return exporter.finished()[-1]
