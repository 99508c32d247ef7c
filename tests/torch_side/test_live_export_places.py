"""Live exports to every kind of storage, and how much memory they take."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from gloo import run_ranks

from ckptool.operations.export import export
from ckptool.storage import open_store

MIB = 1 << 20


def s3_worker(
    rank: int, num_ranks: int, *, url: str, run: str, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Save two layouts to a folder and export them to S3."""
    from dataclasses import asdict

    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch_side import live_models

    from ckptool.torch import Checkpointer, export_live

    reports = []
    for layout in ("tp", "fsdp1"):
        model = live_models.build(layout, dim=912)
        with Checkpointer(f"{run}/{layout}", mode="sync") as checkpointer:
            checkpointer.save(1, {"model": get_model_state_dict(model)})
        report = export_live(
            model,
            f"{url}/{layout}.safetensors",
            dtype="bfloat16" if layout == "tp" else None,
            max_memory=64 * MIB,
            storage_options=options,
            mode="stop" if layout == "tp" else "snapshot",
        )
        reports.append(asdict(report))
    return reports


def test_s3_exports_equal_the_bytes_of_a_checkpoint(
    tmp_path: Path, s3_url: str, s3_options: dict[str, Any]
) -> None:
    """The parts that four ranks upload make the one file that ``ckptool export`` writes."""
    ends = run_ranks(
        __file__, "s3_worker", num_ranks=4, url=s3_url, run=str(tmp_path), options=s3_options
    )
    store = open_store(s3_url, options=s3_options)
    for layout, report in zip(("tp", "fsdp1"), ends[0].result, strict=True):
        ours = tmp_path / f"{layout}.safetensors"
        dtype = "bfloat16" if layout == "tp" else None
        export(str(tmp_path / layout), str(ours), dtype=dtype)
        assert report["num_parts"] > 2
        assert store.read(f"{layout}.safetensors") == ours.read_bytes()
    assert {item.key for item in store.list()} == {"tp.safetensors", "fsdp1.safetensors"}
    assert list(store.list_uploads()) == []


def in_order_worker(rank: int, num_ranks: int, *, root: str) -> dict[str, Any]:
    """Export through a filesystem that takes an object's bytes only in order."""
    from dataclasses import asdict
    from unittest import mock

    from fsspec.implementations.local import LocalFileSystem
    from torch_side import live_models

    from ckptool.storage.fsspec_store import FsspecStore
    from ckptool.torch import export_live, live_request

    def plain(url: str, options: dict[str, Any]) -> FsspecStore:
        return FsspecStore(LocalFileSystem(), url, url=f"odd://{url}", options={}, deadline_s=5)

    model = live_models.build("hsdp")
    with mock.patch.object(live_request, "open_store", plain):
        report = export_live(model, f"{root}/in-order", max_memory=2 * MIB)
    export_live(model, f"{root}/in-parts", max_memory=2 * MIB)
    return asdict(report)


def test_storage_without_parts_is_written_rank_by_rank(tmp_path: Path) -> None:
    """Where an object's bytes must come in order, one rank writes them all, and they are equal."""
    ends = run_ranks(__file__, "in_order_worker", num_ranks=4, root=str(tmp_path))
    assert all(end.result["rank_by_rank"] for end in ends)
    names = [path.name for path in (tmp_path / "in-order").iterdir()]
    assert names == ["model.safetensors"]
    there, parts = (tmp_path / name / names[0] for name in ("in-order", "in-parts"))
    assert there.read_bytes() == parts.read_bytes()


def memory_worker(
    rank: int, num_ranks: int, *, root: str, max_memory: int
) -> dict[str, dict[str, int]]:
    """How far memory grows above what is there before, staging and all, in each mode."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from ckptool.torch import LiveExporter

    mesh = init_device_mesh("cpu", (num_ranks,))
    state: dict[str, Any] = {}
    for number in range(12):
        # every other one interlocks: half of it travels
        placement = Shard(number % 2)
        local = torch.ones((1024, 2048) if number % 2 else (512, 4096))
        state[f"w{number}"] = DTensor.from_local(local, mesh, [placement])
    small = {"model": {"w": state["w0"][:0]}}
    told: dict[str, dict[str, int]] = {}
    for mode in ("stop", "snapshot"):
        with LiveExporter() as exporter:
            options: dict[str, Any] = {"max_memory": max_memory, "mode": mode}
            exporter.export(small, f"{root}/warm-{mode}", **options)
            exporter.wait()
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
            before = _status("VmRSS")
            exporter.export({"model": state}, f"{root}/{mode}", dtype="float16", **options)
            exporter.wait()
            growth = _status("VmHWM") - before
            told[mode] = {"growth": growth, "staged": exporter.staged_bytes}
    return told


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"{name}:\s+(\d+) kB", text)
    assert match is not None
    return int(match[1]) * 1024


def test_memory_stays_within_what_is_allowed(tmp_path: Path) -> None:
    """Beyond the staged share a rank takes twice ``max_memory`` and 64 MiB at most."""
    limit = 16 * MIB
    ends = run_ranks(__file__, "memory_worker", num_ranks=2, root=str(tmp_path), max_memory=limit)
    for end in ends:
        for mode, told in end.result.items():
            assert told["staged"] == (96 * MIB if mode == "snapshot" else 0)
            assert told["growth"] - told["staged"] <= 2 * limit + 64 * MIB
            assert os.path.getsize(tmp_path / mode / "model.safetensors") > 96 * MIB
