"""Plans saves of a 405 B-parameter model for up to 4,096 ranks, with the real planning code.

    python scripts/simulate_scale.py [--ranks 64 512 4096] [--json PATH]

No machine here has such ranks, so each rank's offers are computed instead of gathered: what
rank 0 does with them, the bytes on the wire, the index and the requests are the real ones.
Where all layers would not fit this machine's memory, a part of them is planned, and what grows
with their number is multiplied; the column "layers planned" says how many were.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ckptool.dtypes import dtype_named
from ckptool.formats.dcp_item import encode_item
from ckptool.formats.dcp_metadata import write_metadata
from ckptool.layout import shard_file_name
from ckptool.model import Box, Chunk, Chunks, Index, Item, TensorEntry
from ckptool.planning.boxes import chunk_rows
from ckptool.storage.base import PartLimits
from ckptool.torch.shares import Offer, assign_shares

F32 = dtype_named("float32")
NUM_LAYERS, DIM, FFN, KV, VOCAB = 126, 16384, 53248, 1024, 128256
MOMENTS = ("exp_avg", "exp_avg_sq")
MAX_OFFERS = 300_000
SAVE_S = 60.0  # a save that ends within a minute, between two saves of ten
S3_PUTS_PER_S = 3500  # what S3 promises for one prefix
LIMITS = PartLimits(5 << 20, 5 << 30, 10_000, 16 << 20)


@dataclass(frozen=True)
class Row:
    """One line of the table; bytes and seconds are for the whole model."""

    num_ranks: int
    layers_planned: int
    num_chunks: int
    rank_num_bytes: int
    planning_s: float
    gathered_num_bytes: int
    gathered_per_rank: int
    metadata_num_bytes: int
    metadata_write_s: float
    parts_per_rank: int
    requests_per_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there")
    arguments = parser.parse_args()
    rows = [plan(num_ranks) for num_ranks in arguments.ranks]
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def tensors(num_layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a Llama-like model and of its Adam moments, by key."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, DIM),
        "model.norm.weight": (DIM,),
        "lm_head.weight": (VOCAB, DIM),
    }
    for layer in range(num_layers):
        name = f"model.layers.{layer}"
        for part, shape in (
            ("self_attn.q_proj", (DIM, DIM)),
            ("self_attn.k_proj", (KV, DIM)),
            ("self_attn.v_proj", (KV, DIM)),
            ("self_attn.o_proj", (DIM, DIM)),
            ("mlp.gate_proj", (FFN, DIM)),
            ("mlp.up_proj", (FFN, DIM)),
            ("mlp.down_proj", (DIM, FFN)),
            ("input_layernorm", (DIM,)),
            ("post_attention_layernorm", (DIM,)),
        ):
            shapes[f"{name}.{part}.weight"] = shape
    state = {f"model.{key}": shape for key, shape in shapes.items()}
    for moment in MOMENTS:
        state |= {f"optim.state.{key}.{moment}": shape for key, shape in shapes.items()}
    return state


def plan(num_ranks: int) -> Row:
    """Plan one save as rank 0 does, once every rank's offers are there."""
    whole = tensors(NUM_LAYERS)
    num_layers = min(NUM_LAYERS, max(1, MAX_OFFERS // (27 * num_ranks)))
    state = tensors(num_layers)
    scale = len(whole) / len(state)
    offers = [offers_of(state, rank, num_ranks) for rank in range(num_ranks)]
    one = len(json.dumps([offer.to_json() for offer in offers[0]]))
    begun = time.perf_counter()
    shares = assign_shares(offers)
    planning_s = time.perf_counter() - begun
    num_chunks = sum(map(len, shares))
    index = index_of(state, num_ranks)
    begun = time.perf_counter()
    metadata = len(write_metadata(index))
    write_s = time.perf_counter() - begun
    rank_bytes = sum(numel(shape) for shape in whole.values()) * F32.itemsize // num_ranks
    parts = -(-rank_bytes // LIMITS.part_bytes(rank_bytes))
    return Row(
        num_ranks,
        num_layers,
        round(num_chunks * scale),
        rank_bytes,
        planning_s * scale,
        round(one * scale) * num_ranks,
        round(one * scale),
        round(metadata * scale),
        write_s * scale,
        parts,
        num_ranks * (parts + 2) / SAVE_S,
    )


def offers_of(state: dict[str, tuple[int, ...]], rank: int, num_ranks: int) -> list[Offer]:
    """What FSDP2 leaves on one rank: rows by torch.chunk."""
    offers = []
    for key, shape in state.items():
        start, end = chunk_rows(shape[0], num_ranks)[rank]
        box = Box((start,) + (0,) * (len(shape) - 1), (end - start, *shape[1:]))
        offers.append(Offer(key, F32, shape, box))
    return offers


def index_of(state: dict[str, tuple[int, ...]], num_ranks: int) -> Index:
    """The index of the step, as it will be committed."""
    ends = [0] * num_ranks
    files = [shard_file_name(rank, 0, attempt="7f3a9c00") for rank in range(num_ranks)]
    entries = {}
    for key, shape in state.items():
        chunks = []
        for rank, (start, end) in enumerate(chunk_rows(shape[0], num_ranks)):
            box = Box((start,) + (0,) * (len(shape) - 1), (end - start, *shape[1:]))
            length = encode_item(dtype=F32, shape=box.sizes).length
            chunks.append(Chunk(box, Item(files[rank], ends[rank], length)))
            ends[rank] += length
        path = tuple(key.split(".", 1))
        entries[key] = TensorEntry(key, F32, shape, Chunks.of(chunks, num_dims=len(shape)), path)
    return Index(entries)


def numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def table(rows: list[Row]) -> str:
    """Markdown, for docs/scale.md."""
    titles = (
        "ranks",
        "layers planned",
        "chunks",
        "bytes a rank",
        "planning on rank 0",
        "offers to rank 0, all (a rank)",
        "`.metadata`",
        "written in",
        "parts a rank",
        f"PUTs/s in one prefix, save in {SAVE_S:.0f} s",
    )
    lines = ["| " + " | ".join(titles) + " |", "|" + " --- |" * len(titles)]
    for row in rows:
        cells = (
            f"{row.num_ranks:,}",
            f"{row.layers_planned} of {NUM_LAYERS}",
            f"{row.num_chunks:,}",
            size(row.rank_num_bytes),
            f"{row.planning_s:.1f} s",
            f"{size(row.gathered_num_bytes)} ({size(row.gathered_per_rank)})",
            size(row.metadata_num_bytes),
            f"{row.metadata_write_s:.1f} s",
            f"{row.parts_per_rank:,}",
            f"{row.requests_per_s:,.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


if __name__ == "__main__":
    main()
