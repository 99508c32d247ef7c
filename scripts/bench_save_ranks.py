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

from bench_ranks import join_ranks, start_ranks
from bench_save_steps import measure_steps
from simulated_ranks import load_as, save_as

_NUM_TENSORS = 24
_COLLECTION_S = 5.0  # RGW collects what was deleted every second


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
    dist.destroy_process_group()


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

    def ours(number: int) -> None:
        checkpointer.save(number, state)
        checkpointer.wait()

    def client(number: int) -> None:
        asyncio.run(_upload(raw, f"{url}/raw/{number}-{rank}", options))

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
    saves: dict[str, list[float]] = {case: [] for case in spec["cases"]}
    loads: dict[str, list[float]] = {"ckptool": [], "dcp.load + FsspecReader": []}
    amplifications: list[float] = []

    def ours_back(number: int) -> None:
        report = checkpointer.load(state, step=number)
        assert report is not None
        amplifications.append(report.amplification)

    client(999)  # a new bucket is slow at first: nobody's figures should have that in them
    for number in range(spec["num_rounds"]):
        for case in spec["cases"]:
            if number == 0 or case not in spec["once"]:
                saves[case].append(_timed(lambda c=case, n=number: savers[c](n)))
        loads["ckptool"].append(_timed(lambda n=number: ours_back(n)))
        reader = FsspecReader(f"{url}/stock/{number}", **options)
        loads["dcp.load + FsspecReader"].append(
            _timed(lambda r=reader: dcp.load(state, storage_reader=r))
        )
        _empty(url, options)
    checkpointer.close()
    return {"save": saves, "load": loads, "amplification": max(amplifications)}


def _empty(url: str, options: dict[str, Any]) -> None:
    """Remove what the last round wrote: a server that keeps objects in memory has no more."""
    import torch.distributed as dist

    from ckptool.storage import open_store

    if dist.get_rank() == 0:
        store = open_store(url, options=options)
        for found in store.list():
            store.delete(found.key)
        time.sleep(_COLLECTION_S)
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


async def _upload(data: memoryview, url: str, options: dict[str, Any]) -> None:
    """The bare client, from memory: the same parts, as many in flight."""
    import s3fs
    from bench_s3 import _CONFIG, AT_ONCE, PART_BYTES, Client

    filesystem = s3fs.S3FileSystem(
        asynchronous=True, config_kwargs=_CONFIG, skip_instance_cache=True, **options
    )
    session = await filesystem.set_session()
    s3 = await filesystem.get_s3()

    async def send(upload: dict[str, Any], number: int, start: int, end: int) -> str:
        body = bytes(data[start:end])
        answer = await s3.upload_part(**upload, PartNumber=number, Body=body)
        return str(answer["ETag"])

    try:
        sender = Client(s3, part_bytes=PART_BYTES, at_once=AT_ONCE)
        await sender._write(url, "", len(data), send)
    finally:
        await session.close()


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
