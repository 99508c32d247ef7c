"""A live export is, byte for byte, what ``ckptool export`` makes of a checkpoint of that step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gloo import RankEnd, run_ranks
from torch_side.live_models import LAYOUTS

from ckptool.operations.export import export

MIB = 1 << 20

# What is asked for, with the extra that only a live export takes.
WISHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it is": ({}, {"max_memory": 4 * MIB}),
    "cast, several files, stopped": (
        {"dtype": "bfloat16", "max_file_size": 1_000_000},
        {"max_memory": 2 * MIB, "mode": "stop"},
    ),
    "some, renamed, cast twice": (
        {
            "only": ["model.blocks.*", "model.scale"],
            "strip_prefix": "model.",
            "rename": {"scale": "factor"},
            "dtype": "float16",
        },
        {"max_memory": 4 * MIB},
    ),
    "fp8, rank by rank": (
        {"dtype": "float8_e4m3fn", "exclude": ["model.table.*"]},
        {"rank_by_rank": True, "mode": "stop", "max_memory": 2 * MIB},
    ),
}


def worker(rank: int, num_ranks: int, *, root: str, layouts: list[str]) -> dict[str, Any]:
    """Save and export every layout; what each export reported."""
    from dataclasses import asdict

    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch_side import live_models

    from ckptool.torch import Checkpointer, LiveExporter

    told: dict[str, Any] = {}
    with LiveExporter() as exporter:
        for layout in layouts:
            model = live_models.build(layout)
            with Checkpointer(f"{root}/{layout}/run", mode="sync") as checkpointer:
                checkpointer.save(1, {"model": get_model_state_dict(model), "step": 1})
            for number, (same, own) in enumerate(WISHES.values()):
                place = f"{root}/{layout}/live{number}"
                exporter.export(model, place, **same, **own)
                exporter.wait()
                told[f"{layout} {number}"] = [asdict(row) for row in exporter.finished()]
    return told


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RankEnd]]:
    root = tmp_path_factory.mktemp("live")
    ends = run_ranks(
        __file__, "worker", num_ranks=4, root=str(root), layouts=list(LAYOUTS), timeout_s=200
    )
    return root, ends


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(len(WISHES)), ids=list(WISHES))
def test_layout_exports_the_bytes_of_its_checkpoint(
    exported: tuple[Path, list[RankEnd]], layout: str, number: int
) -> None:
    """Whatever the layout and the wish, the files are those of the export of a saved step."""
    place = exported[0] / layout
    same, _ = list(WISHES.values())[number]
    export(str(place / "run"), str(place / f"ours{number}"), **same)
    ours, live = files(place / f"ours{number}"), files(place / f"live{number}")
    assert sorted(live) == sorted(ours)
    assert live == ours
    assert len(live) > 2 or "max_file_size" not in same


def test_shards_are_written_where_they_are(exported: tuple[Path, list[RankEnd]]) -> None:
    """Of shards on dim 0 only what is too small for a part of its own travels, and every rank
    reports the same."""
    _, ends = exported
    reports = [end.result["fsdp2 0"][0] for end in ends]
    for report in reports:
        assert report["committed"]
        assert report["num_parts"] >= 8
        assert report["num_bytes_travelled"] < report["num_bytes"] / 4
        assert report["num_bytes"] == reports[0]["num_bytes"] == sum(report["files"].values())


def test_casts_say_what_they_lost(exported: tuple[Path, list[RankEnd]]) -> None:
    """Overflows and underflows are counted over all ranks, whichever way a layout cut them."""
    root, ends = exported
    name = "model.blocks.0.norm.bias"
    result = export(
        str(root / "plain" / "run"), str(root / "counted"), **WISHES["some, renamed, cast twice"][0]
    ).to_json()
    assert result["casts"][name]["underflows"] > 200
    for layout in LAYOUTS:
        (report,) = ends[1].result[f"{layout} 2"]
        assert report["casts"] == result["casts"], layout
