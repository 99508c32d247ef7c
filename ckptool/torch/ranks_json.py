"""Errors as JSON, so that one process can raise what another one met."""

from __future__ import annotations

import json
from typing import Any

from ckptool import errors
from ckptool.errors import CkptoolError

__all__ = ["error_from_json", "error_to_json"]


def error_to_json(error: BaseException) -> str:
    """What other ranks need to raise the same error."""
    if isinstance(error, CkptoolError):
        kind, message, hint = type(error).__name__, error.message, error.hint
    else:
        kind, message, hint = "CkptoolError", f"{type(error).__name__}: {error}", None
    return json.dumps({"kind": kind, "message": message, "hint": hint})


def error_from_json(text: str, *, rank: int | None) -> CkptoolError:
    """The error that a rank had; ``rank`` goes into its message, None leaves it out."""
    facts: dict[str, Any] = json.loads(text)
    kind = getattr(errors, facts["kind"], CkptoolError)
    message = facts["message"]
    if rank is not None and not message.startswith("rank "):
        message = f"rank {rank}: {message}"
    result = kind(message, hint=facts["hint"])
    assert isinstance(result, CkptoolError)
    return result
