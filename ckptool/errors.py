"""One error class per thing a caller can do about it.

    CkptoolError                 exit 1    unexpected failure
    ├── UsageError               exit 2    call it differently
    ├── DamagedError             exit 3    the checkpoint is damaged, hostile or incomplete
    ├── NoCheckpointError        exit 10   nothing committed is there
    ├── RefusedError             exit 11   refused before anything was written
    │   ├── NotEmptyError                  the destination holds something
    │   ├── UnsupportedError               a dtype, class or format that we do not know
    │   └── OverBudgetError                it does not fit --max-memory
    ├── StorageError             exit 12   storage failed after retries
    │   ├── ObjectMissingError             the object is not there
    │   ├── ShortReadError                 fewer bytes came than the object has
    │   └── AccessError                    bad credentials, no permission, no bucket, no network
    └── InterruptedByUser        exit 130

Every message says what, where and what to do next: ``message`` names the tensor, box, file
and byte; ``hint`` is the next command or step.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AccessError",
    "CkptoolError",
    "DamagedError",
    "InterruptedByUser",
    "NoCheckpointError",
    "NotEmptyError",
    "ObjectMissingError",
    "OverBudgetError",
    "RefusedError",
    "ShortReadError",
    "StorageError",
    "UnsupportedError",
    "UsageError",
]


class CkptoolError(Exception):
    """A failure that a user can read.

    ``message`` is one clear sentence; ``hint`` says what to do next; ``facts`` holds what
    the message names (``url``, ``entry``, ``file``, ``offset`` ...) for ``--json``.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.facts = facts

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), self.message, self.hint, self.facts)


def _rebuild(
    kind: type[CkptoolError], message: str, hint: str | None, facts: dict[str, Any]
) -> CkptoolError:
    return kind(message, hint=hint, **facts)


class UsageError(CkptoolError):
    """The call itself is wrong."""

    exit_code = 2


class DamagedError(CkptoolError):
    """The checkpoint is damaged, hostile or incomplete, though its ``.metadata`` is there."""

    exit_code = 3


class NoCheckpointError(CkptoolError):
    """Nothing committed is there: no ``.metadata``, or one of 0 bytes."""

    exit_code = 10


class RefusedError(CkptoolError):
    """Refused before anything was written."""

    exit_code = 11


class NotEmptyError(RefusedError):
    """The destination already holds something."""


class UnsupportedError(RefusedError):
    """A dtype, class or format that this version does not know."""


class OverBudgetError(RefusedError):
    """The work does not fit the memory budget."""


class StorageError(CkptoolError):
    """Storage failed after retries."""

    exit_code = 12


class ObjectMissingError(StorageError):
    """The object that was asked for is not there."""


class ShortReadError(StorageError):
    """Fewer bytes came than were asked for, after retries."""


class AccessError(StorageError):
    """Bad credentials, no permission, no such bucket, or no network."""


class InterruptedByUser(CkptoolError):
    """Ctrl-C or SIGTERM."""

    exit_code = 130
