"""What an export asks for -> a destination that is free, and what all ranks hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from ckptool.errors import RefusedError, UnsupportedError, UsageError
from ckptool.operations.export_target import Destination, destination_of, refuse_existing
from ckptool.operations.transfer import require_new_or_resumed
from ckptool.storage import open_store
from ckptool.storage.base import Store
from ckptool.torch.group import Group
from ckptool.torch.live_plan import Held, holdings_json, read_holdings
from ckptool.torch.local_state import LocalShard, flatten

__all__ = ["live_destination", "look_at", "open_together"]


def live_destination(
    destination: str, max_file_size: int | None, beside: Mapping[str, bytes] | None
) -> Destination:
    """The folder or file to write; raises UsageError or UnsupportedError."""
    form = destination_of(destination, None, max_file_size)
    if form.format != "safetensors":
        raise UnsupportedError(
            f"{destination}: a live export writes safetensors only",
            hint="name a folder or a .safetensors file; ckptool export makes a .pt of a checkpoint",
        )
    if beside and form.name is not None:
        raise UsageError(f"{destination} is one file: nothing is written beside it")
    return form


def open_together(form: Destination, options: Mapping[str, Any], group: Group) -> Store:
    """The destination on every rank, where nothing stands yet."""
    opened: list[Store] = []

    def open_it() -> bytes:
        store = open_store(form.folder, options=options)
        if group.size > 1 and not store.capabilities.shared:
            raise RefusedError(
                f"{store.url} is seen by one process only, and there are {group.size} ranks",
                hint="give a folder that all hosts share, or an object store",
            )
        opened.append(store)
        return b""

    group.together(open_it)
    (store,) = opened
    group.from_rank_0(
        lambda: require_new_or_resumed(
            store,
            form.journal_key,
            resume=False,
            refuse_existing=lambda: refuse_existing(store, form),
        )
    )
    return store


def look_at(model: nn.Module | Mapping[str, Any], group: Group) -> tuple[Held, list[LocalShard]]:
    """What all ranks hold of the model, and this rank's own pieces; collective."""
    shards: list[LocalShard] = []

    def look() -> bytes:
        state = model if isinstance(model, Mapping) else {"model": get_model_state_dict(model)}
        flat = flatten(state)
        shards.extend(flat.shards)
        return holdings_json(flat)

    return read_holdings(group.together(look)), shards
