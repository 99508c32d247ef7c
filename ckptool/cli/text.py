"""Numbers and rows -> text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["count", "size", "some", "table"]


def size(num_bytes: int | None) -> str:
    """``1.5 GiB``; ``?`` where it is not known."""
    if num_bytes is None:
        return "?"
    number, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{number:.1f} {unit}"


def count(number: int, noun: str) -> str:
    """``1 file``, ``3 files``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Aligned lines; numbers to the right."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(len(r[i]) for r in [list(header), *cells]) for i in range(len(header))]
    right = [all(isinstance(row[i], int) for row in rows) for i in range(len(header))]
    for line in [list(header), *cells]:
        padded = (
            c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)
        )
        yield "  ".join(padded).rstrip()


def some(names: Sequence[str], *, limit: int = 3) -> str:
    """The first few names."""
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
