"""Progress events: what long work tells whoever watches; printing is the CLI's."""

from __future__ import annotations

from typing import Protocol

__all__ = ["NO_PROGRESS", "Progress"]


class Progress(Protocol):
    """Receives events of one operation; called from any thread."""

    def start(self, label: str, *, num_bytes: int | None) -> None:
        """A phase begins; ``num_bytes`` is its total, None when it is not known."""

    def advance(self, num_bytes: int) -> None:
        """``num_bytes`` more are done."""

    def note(self, message: str) -> None:
        """Something a person should read now."""

    def finish(self) -> None:
        """The phase is over."""


class _Silent:
    def start(self, label: str, *, num_bytes: int | None) -> None: ...

    def advance(self, num_bytes: int) -> None: ...

    def note(self, message: str) -> None: ...

    def finish(self) -> None: ...


NO_PROGRESS: Progress = _Silent()
