"""What a torch file will hold: nested dicts of tensors and of the values that can be carried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptool.engine.located import located
from ckptool.engine.normal import item_blocks
from ckptool.errors import OverBudgetError, UnsupportedError
from ckptool.formats.dcp_item import parse_value_item
from ckptool.formats.nesting import nest
from ckptool.formats.plain_values import TensorRef, decode_value
from ckptool.formats.torch_file import TensorSpec
from ckptool.model import ValueEntry
from ckptool.operations.open import Checkpoint
from ckptool.planning.export import ExportFile, ExportLayout

__all__ = ["Trees", "read_trees"]


@dataclass(frozen=True, slots=True)
class Trees:
    """Per file name its tree; the bytes of tensors inside values; the values left out."""

    by_file: Mapping[str, Mapping[str, Any]]
    records: Mapping[str, bytes]
    left_out: Mapping[str, str]


def read_trees(
    checkpoint: Checkpoint, layout: ExportLayout, *, int_keys: bool, max_memory: int
) -> Trees:
    """Read and decode the chosen values, and nest them with the tensors.

    Values go into the first file. Raises OverBudgetError when the values alone do not fit
    half of ``max_memory``.
    """
    records: dict[str, bytes] = {}
    left_out: dict[str, str] = {}
    values: dict[str, Any] = {}
    room = max_memory // 2
    for key in layout.values:
        entry = checkpoint.index.entries[key]
        assert isinstance(entry, ValueEntry) and entry.item is not None
        room -= entry.item.length
        if room < 0:
            raise OverBudgetError(
                f"the values up to {key} do not fit half of --max-memory {max_memory}",
                hint=f"give a larger --max-memory, or --exclude '{key}'",
                entry=key,
            )
        with located(key, None, entry.item):
            try:
                values[key] = _read(checkpoint, entry, records, room=max_memory)
            except UnsupportedError as error:
                left_out[key] = error.message
    by_file = {
        file.name: _tree(layout, file, values if number == 0 else {}, int_keys)
        for number, file in enumerate(layout.files)
    }
    return Trees(by_file, records, left_out)


def _read(
    checkpoint: Checkpoint, entry: ValueEntry, records: dict[str, bytes], *, room: int
) -> Any:
    """The plain value of an entry; tensors inside it point at ``records`` of their own names.

    ``room`` bounds what a compressed item may grow to.
    """
    assert entry.item is not None
    data = b"".join(item_blocks(checkpoint.store, entry.item, max_bytes=room))
    item = parse_value_item(data)
    found: dict[str, bytes] = {}

    def move(ref: TensorRef) -> TensorRef:
        place = item.storages[ref.record]
        name = f"{entry.key}\0{ref.record}"
        found[name] = data[place.offset : place.offset + place.num_bytes]
        return replace(ref, record=name)

    value = _with_tensors(decode_value(item.pickle), move)
    records.update(found)
    return value


def _with_tensors(value: Any, move: Callable[[TensorRef], TensorRef]) -> Any:
    """The value with every tensor reference moved; other leaves as they are."""
    if isinstance(value, TensorRef):
        return move(value)
    if isinstance(value, frozenset):
        raise UnsupportedError("torch.load(weights_only=True) takes no frozenset")
    if isinstance(value, dict):
        return type(value)((key, _with_tensors(v, move)) for key, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(_with_tensors(v, move) for v in value)
    return value


def _tree(
    layout: ExportLayout, file: ExportFile, values: Mapping[str, Any], int_keys: bool
) -> Mapping[str, Any]:
    choice = layout.choice
    leaves: dict[str, Any] = {t.key: TensorSpec(t.key, t.dtype, t.shape) for t in file.tensors}
    leaves.update(values)
    order = [key for key in choice.names if key in leaves]
    return nest(
        {choice.names[key]: leaves[key] for key in order},
        {choice.names[key]: choice.paths[key] for key in order},
        int_keys=int_keys,
    )
