"""Every layout trains alike, saves alike, and takes over from every other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import losses, metric, run_jobs
from trainer_jobs import LAYOUTS, VARIANTS, config_tree

pytestmark = pytest.mark.timeout(900)  # the first test pays for the whole star

CANONICAL = "fsdp2"
STEP = "step-00000002"
NO_SAVE: dict[str, Any] = {"checkpoint": {"every": 0, "final": False}}


def _keys(step: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint import FileSystemReader

    entries = FileSystemReader(str(step)).read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if not name.startswith("rng.")}


def _shapes(step: Path) -> dict[str, Any]:
    return {name: getattr(entry, "size", None) for name, entry in _keys(step).items()}


def _codes(results: list[dict[str, Any]]) -> set[Any]:
    return {job["code"] for result in results for job in result.values()}


@pytest.fixture(scope="module")
def star(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each layout from the start; then each resumed by the canonical one, and the reverse."""
    folder = tmp_path_factory.mktemp("star")
    jobs = [
        {"name": name, "config": config_tree(folder / name, **tables)}
        for name, tables in LAYOUTS.items()
    ]
    for name, tables in LAYOUTS.items():
        arrow = f"{name}-to-canonical"
        start = str(folder / name / STEP)
        config = config_tree(folder / arrow, **NO_SAVE, **LAYOUTS[CANONICAL])
        jobs.append({"name": arrow, "start_from": start, "config": config})
        if name != CANONICAL:
            arrow = f"canonical-to-{name}"
            start = str(folder / CANONICAL / STEP)
            config = config_tree(folder / arrow, **NO_SAVE, **tables)
            jobs.append({"name": arrow, "start_from": start, "config": config})
    assert _codes(run_jobs(jobs, num_ranks=4, folder=folder)) == {0}
    start = str(folder / CANONICAL / STEP)
    single = [
        {"name": "one", "config": config_tree(folder / "one")},
        {
            "name": "canonical-to-one",
            "start_from": start,
            "config": config_tree(folder / "canonical-to-one", **NO_SAVE),
        },
    ]
    assert _codes(run_jobs(single, num_ranks=1, folder=folder)) == {0}
    return folder


@pytest.mark.parametrize("name", [*LAYOUTS, "one"])
def test_layout_trains_like_the_canonical_one(star: Path, name: str) -> None:
    """The first weights and the order of the data are the same whatever the layout."""
    assert losses(star / name) == pytest.approx(losses(star / CANONICAL), rel=1e-4)


@pytest.mark.parametrize("name", [*LAYOUTS, "one"])
def test_layout_clips_by_the_same_norm(star: Path, name: str) -> None:
    """The gradient's norm is that of the whole model, however it is cut."""
    whole = metric(star / CANONICAL, "grad_norm")
    assert metric(star / name, "grad_norm") == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("name", [*LAYOUTS, "one"])
def test_layout_stores_the_same_entries(star: Path, name: str) -> None:
    """Names and shapes in the checkpoint do not tell which layout wrote it."""
    assert _shapes(star / name / STEP) == _shapes(star / CANONICAL / STEP)


@pytest.mark.parametrize("name", LAYOUTS)
def test_canonical_resumes_every_layout(star: Path, name: str) -> None:
    """FSDP2 goes on from any layout's step as if it had trained it."""
    whole, resumed = losses(star / CANONICAL), losses(star / f"{name}-to-canonical")
    assert resumed == pytest.approx({step: whole[step] for step in (3, 4)}, rel=1e-4)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != CANONICAL] + ["one"])
def test_every_layout_resumes_the_canonical(star: Path, name: str) -> None:
    """Any layout goes on from FSDP2's step as if it had trained it."""
    whole, resumed = losses(star / CANONICAL), losses(star / f"canonical-to-{name}")
    assert resumed == pytest.approx({step: whole[step] for step in (3, 4)}, rel=1e-4)


def test_same_world_size_resumes_bit_identically(star: Path) -> None:
    """A resume of the same layout is no different from not having stopped."""
    whole, resumed = losses(star / CANONICAL), losses(star / f"{CANONICAL}-to-canonical")
    assert resumed == {step: whole[step] for step in (3, 4)}


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("variants")
    jobs = [
        {"name": name, "config": config_tree(folder / name, run={"steps": 2}, **tables)}
        for name, tables in {CANONICAL: {}, **VARIANTS}.items()
    ]
    assert _codes(run_jobs(jobs, num_ranks=2, folder=folder)) == {0}
    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_keeps_names_and_numbers(variants: Path, name: str) -> None:
    """Recomputation, compilation, precision and units reach neither key names nor, beyond
    their rounding, the losses."""
    loose = any(word in name for word in ("mixed", "bf16", "fp16"))
    base = "tied" if name.endswith("tied") else CANONICAL
    for what, tolerance in (("loss", 1e-3 if loose else 1e-4), ("grad_norm", 0.02)):
        whole = metric(variants / base, what)
        assert metric(variants / name, what) == pytest.approx(whole, rel=tolerance)
    names = {key for key in _keys(variants / name / STEP) if not key.startswith("scaler")}
    assert names == set(_keys(variants / base / STEP))


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_every_layout_resumes_every_other(star: Path) -> None:
    """The full matrix: any layout goes on from any other's step."""
    jobs = [
        {
            "name": f"{source}-to-{target}",
            "start_from": str(star / source / STEP),
            "config": config_tree(star / f"{source}-to-{target}", **NO_SAVE, **LAYOUTS[target]),
        }
        for source in LAYOUTS
        for target in LAYOUTS
        if CANONICAL not in (source, target)
    ]
    assert _codes(run_jobs(jobs, num_ranks=4, folder=star, timeout_s=1800)) == {0}
    whole = {step: loss for step, loss in losses(star / CANONICAL).items() if step > 2}
    for job in jobs:
        assert losses(star / job["name"]) == pytest.approx(whole, rel=1e-4), job["name"]
