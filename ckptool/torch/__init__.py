"""Checkpoints inside a training loop: saved without stopping it, loaded at any world size.

The only package of ckptool that imports torch; importing it does not, until a name is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptool.torch.checkpointer import Checkpointer
    from ckptool.torch.dcp_storage import CkptoolReader, CkptoolWriter
    from ckptool.torch.live_export import ExportReport, LiveExporter, export_live
    from ckptool.torch.reports import LoadReport, SaveReport

__all__ = [
    "Checkpointer",
    "CkptoolReader",
    "CkptoolWriter",
    "ExportReport",
    "LiveExporter",
    "LoadReport",
    "SaveReport",
    "export_live",
]

_HOMES = {
    "Checkpointer": "checkpointer",
    "CkptoolReader": "dcp_storage",
    "CkptoolWriter": "dcp_storage",
    "ExportReport": "live_export",
    "LiveExporter": "live_export",
    "LoadReport": "reports",
    "SaveReport": "reports",
    "export_live": "live_export",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
