"""A URL -> an opened checkpoint: one listing, its index and its manifest, and what they agree on.

The URL may name a checkpoint or a run; of a run its newest committed step is opened. Nothing
but names, sizes and the metadata files is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptool.errors import CkptoolError, DamagedError, NoCheckpointError, UnsupportedError
from ckptool.layout import is_checkpoint_listing, is_committed, step_number
from ckptool.manifest import Manifest
from ckptool.model import Index
from ckptool.operations.ls import nothing_there
from ckptool.operations.open_forms import is_safetensors_folder, read_forms
from ckptool.planning.findings import Finding
from ckptool.storage import open_store
from ckptool.storage.base import Listing, ObjectInfo, Store

if TYPE_CHECKING:
    from ckptool.formats.payloads import Payloads

__all__ = ["Checkpoint", "open_checkpoint"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose index was read; ``store`` is rooted at its folder.

    ``objects`` are all that were listed in it; ``findings`` say where a manifest or a
    ``ckpt.index`` disagrees with ``.metadata``, which wins. ``payloads`` are each tensor's
    payload places and CRCs, None without a ``ckpt.index``.
    """

    url: str
    store: Store
    objects: Mapping[str, ObjectInfo]
    step: int | None
    index: Index
    manifest: Manifest | None
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    payloads: Mapping[str, Payloads] | None = None

    @property
    def form(self) -> str:
        return self.index.form

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each object."""
        return {key: info.num_bytes for key, info in self.objects.items()}


def open_checkpoint(source_url: str, *, options: Mapping[str, Any] | None = None) -> Checkpoint:
    """Open a checkpoint, or the newest committed step of a run.

    Raises NoCheckpointError where nothing committed is there, DamagedError where its metadata
    cannot be read or two steps have one number, UnsupportedError for a form we do not know.
    """
    store = open_store(source_url, options=options)
    level = store.list_level()
    sizes = _sizes(level.objects)
    if is_checkpoint_listing(sizes) or is_safetensors_folder(sizes):
        return _open(store, level, notes=())
    return _open_newest(store, level)


def _open_newest(run: Store, level: Listing) -> Checkpoint:
    """The newest committed step; only the candidate is parsed."""
    numbered: dict[int, list[str]] = {}
    for name in level.folders:
        number = step_number(name)
        if number is not None:
            numbered.setdefault(number, []).append(name)
    notes: list[str] = []
    for number in sorted(numbered, reverse=True):
        found = _checkpoints(run, numbered[number])
        if len(found) > 1:
            raise DamagedError(
                f"step {number} of {run.url} is there {len(found)} times: "
                f"{', '.join(sorted(found))}",
                hint="name one of them, or rename or remove the others",
                url=run.url,
            )
        for name, below in found.items():
            if is_committed(_sizes(below.objects)):
                return _open_candidate(run, name, below, tuple(notes))
            notes.append(f"{name} is newer and not committed")
    raise _no_step(run, level, notes)


def _checkpoints(run: Store, names: list[str]) -> dict[str, Listing]:
    """Those of the folders that are checkpoints, committed or not."""
    levels = {name: run.child(name).list_level() for name in names}
    return {n: v for n, v in levels.items() if is_checkpoint_listing(_sizes(v.objects))}


def _open_candidate(run: Store, name: str, level: Listing, notes: tuple[str, ...]) -> Checkpoint:
    try:
        return _open(run.child(name), level, notes=(f"opened {name}, the newest", *notes))
    except (DamagedError, UnsupportedError) as error:
        raise type(error)(
            f"the newest committed step, {name}, cannot be opened: {error.message}",
            hint=f"an older step may be whole: ckptool ls {run.url}, then name it",
            **{**error.facts, "url": run.url_of(name)},
        ) from error


def _no_step(run: Store, level: Listing, notes: list[str]) -> CkptoolError:
    if notes:
        return NoCheckpointError(
            f"no committed step in {run.url}: {'; '.join(notes)}".replace(" newer and", ""),
            hint=f"no save has completed there; ckptool ls {run.url} lists what is there",
            url=run.url,
            state="uncommitted",
        )
    return nothing_there(run.url, [info.key for info in run.list()])


def _open(store: Store, level: Listing, *, notes: tuple[str, ...]) -> Checkpoint:
    infos = store.list() if level.folders else level.objects
    objects = {info.key: info for info in infos}
    try:
        forms = read_forms(store, _sizes(infos))
    except (DamagedError, UnsupportedError) as error:
        raise _placed(error, store.url) from error
    name = store.url.rstrip("/").rsplit("/", 1)[-1]
    step = forms.manifest.step if forms.manifest is not None else None
    return Checkpoint(
        url=store.url,
        store=store,
        objects=objects,
        step=step_number(name) if step is None else step,
        index=forms.index,
        manifest=forms.manifest,
        findings=forms.findings,
        notes=(*notes, *forms.index.notes),
        payloads=forms.payloads,
    )


def _placed(error: CkptoolError, url: str) -> CkptoolError:
    """The same error, saying in which checkpoint and what to do."""
    parent = url.rpartition("/")[0]
    hint = error.hint or f"take a copy of it that is whole, or an older step: ckptool ls {parent}"
    return type(error)(f"{url}: {error.message}", hint=hint, **{"url": url, **error.facts})


def _sizes(objects: Any) -> dict[str, int]:
    return {info.key: info.num_bytes for info in objects}
