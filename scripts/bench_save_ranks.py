"""One job of bench_save: starts its ranks, in which all contenders take turns.

    python scripts/bench_save_ranks.py '{"job": "server", "num_ranks": 2, ...}'

Rank 0 prints the result as the last line, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_ranks import join_ranks, leave_ranks, start_ranks
from bench_save_steps import measure_steps
from simulated_ranks import load_as, save_as

_NUM_TENSORS = 24


def main() -> None:
    spec = json.loads(sys.argv[1])
    if spec["job"] == "amplification":
        print(json.dumps(_amplification(spec)))
    elif "RANK" not in os.environ:
        start_ranks(__file__, spec)
    else:
        _rank(spec)


def _rank(spec: dict[str, Any]) -> None:
    import torch.distributed as dist

    join_ranks(spec["device"])
    result = measure_steps(spec) if spec["job"] == "steps" else _server(spec)
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    leave_ranks()


def _server(spec: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    from ckptool.torch import Checkpointer

    url, options = spec["url"], spec["options"]
    state = _state(spec["state_bytes"])
    num_own = sum(tensor.to_local().nbytes for tensor in state.values())
    raw = memoryview(torch.empty(num_own, dtype=torch.uint8).random_().numpy())
    rank = dist.get_rank()
    checkpointer = Checkpointer(f"{url}/ours", storage_options=options)
    checkpointer.prepare(state)
    bare = _BareClient(options)

    def ours(number: int) -> None:
        checkpointer.save(number, state)
        checkpointer.wait()

    def client(number: int) -> None:
        bare.upload(raw, f"{url}/raw/{number}-{rank}")

    def fsspec_writer(number: int) -> None:
        dcp.save(state, storage_writer=FsspecWriter(f"{url}/stock/{number}", **options))

    def asynchronous(kind: AsyncCheckpointerType) -> Callable[[int], None]:
        def save(number: int) -> None:
            writer = FsspecWriter(f"{url}/{kind.value}/{number}", **options)
            dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind).result()

        return save

    savers: dict[str, Callable[[int], None]] = {
        "ckptool": ours,
        "client": client,
        "dcp.save + FsspecWriter": fsspec_writer,
        "dcp.async_save, thread": asynchronous(AsyncCheckpointerType.THREAD),
        "dcp.async_save, process": asynchronous(AsyncCheckpointerType.PROCESS),
    }
    saves: dict[str, list[float]] = {case: [] for case in [*spec["cases"], *spec["once"]]}
    loads: dict[str, list[float]] = {"ckptool": [], "dcp.load + FsspecReader": []}
    amplifications: list[float] = []

    def ours_back(number: int) -> None:
        report = checkpointer.load(state, step=number)
        assert report is not None
        amplifications.append(report.amplification)

    def stock_back(number: int) -> None:
        dcp.load(state, storage_reader=FsspecReader(f"{url}/stock/{number}", **options))

    loaders = {"ckptool": ours_back, "dcp.load + FsspecReader": stock_back}
    # the first round is not counted: a new bucket, and every contender's first call, are slow
    for number in range(spec["num_rounds"] + 1):
        shift = number % len(spec["cases"])  # who comes first finds another server than the last
        for case in [*spec["cases"][shift:], *spec["cases"][:shift], *spec["once"]]:
            if number < 2 or case not in spec["once"]:
                saves[case].append(_timed(lambda c=case, n=number: savers[c](n)))
        for case, loader in loaders.items():
            loads[case].append(_timed(lambda c=loader, n=number: c(n)))
        _empty(url, options, spec["collection_s"])
    checkpointer.close()
    bare.close()
    return {
        "save": {case: seconds[1:] for case, seconds in saves.items()},
        "load": {case: seconds[1:] for case, seconds in loads.items()},
        "amplification": max(amplifications),
    }


def _empty(url: str, options: dict[str, Any], collection_s: float) -> None:
    """Remove what the last round wrote: a server that keeps objects in memory has no more."""
    import torch.distributed as dist

    from ckptool.storage import open_store

    if dist.get_rank() == 0:
        store = open_store(url, options=options)
        for found in store.list():
            store.delete(found.key)
        time.sleep(collection_s)
    dist.barrier()


def _timed(work: Callable[[], None]) -> float:
    import torch.distributed as dist

    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started


def _state(num_bytes: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = max(1, num_bytes // _NUM_TENSORS // 4 // 1024 // dist.get_world_size())
    return {
        f"layer.{number:02}.weight": DTensor.from_local(torch.randn(rows, 1024), mesh, [Shard(0)])
        for number in range(_NUM_TENSORS)
    }


class _BareClient:
    """Uploads from memory: the same parts as ours, as many in flight, one session for all."""

    def __init__(self, options: dict[str, Any]) -> None:
        import s3fs
        from bench_s3 import _CONFIG, AT_ONCE, PART_BYTES, Client

        self._loop = asyncio.new_event_loop()
        filesystem = s3fs.S3FileSystem(
            asynchronous=True,
            config_kwargs=_CONFIG,
            skip_instance_cache=True,
            **options,
        )
        self._session = self._loop.run_until_complete(filesystem.set_session())
        s3 = self._loop.run_until_complete(filesystem.get_s3())
        self._client = Client(s3, part_bytes=PART_BYTES, at_once=AT_ONCE)

    def upload(self, data: memoryview, url: str) -> None:
        async def send(upload: dict[str, Any], number: int, start: int, end: int) -> str:
            body = bytes(data[start:end])
            answer = await self._client.s3.upload_part(**upload, PartNumber=number, Body=body)
            return str(answer["ETag"])

        self._loop.run_until_complete(self._client.write(url, "", len(data), send))

    def close(self) -> None:
        self._loop.run_until_complete(self._session.close())
        self._loop.close()


def _amplification(spec: dict[str, Any]) -> dict[str, float]:
    """Bytes fetched for each byte needed, at the same world and between 4 ranks and 16."""
    import torch

    from ckptool.storage import open_store

    tensors = {
        "embedding": torch.randn(4096, 1024),
        "wide": torch.randn(1000, 2100),
        "norm": torch.randn(1024),
    }
    run = open_store(Path(spec["url"], "amplification"))
    found: dict[str, float] = {}
    for saved, loaded in ((4, 4), (4, 16), (16, 4)):
        name = f"step-{saved}-{loaded}"
        save_as(run, name, tensors, num_ranks=saved)
        count, _ = load_as(run.child(name), tensors, num_ranks=loaded)
        kind = "same_world" if saved == loaded else "reshard"
        found[kind] = max(found.get(kind, 0.0), count.fetched / count.needed)
    return found


if __name__ == "__main__":
    main()
