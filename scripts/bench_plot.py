"""Series of numbers -> an SVG with one panel for each quantity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Panel", "draw"]

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _GAP = 340, 220, 60, 40, 50, 40
_COLOURS = ("#1565c0", "#c62828", "#2e7d32", "#6a1b9a")
_TICKS = 4


@dataclass(frozen=True)
class Panel:
    """One quantity by contender, a value for each label of the x axis."""

    title: str
    series: Mapping[str, Sequence[float]]


def draw(panels: Sequence[Panel], *, labels: Sequence[str], title: str) -> str:
    """The picture; every y axis starts at 0."""
    step = _LEFT + _WIDTH + _GAP
    width, height = step * len(panels), _TOP + _HEIGHT + _BOTTOM + 20 * 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(_LEFT, 16, title, size=14),
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({number * step + _LEFT},{_TOP})">')
        parts += _panel(panel, labels)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, labels: Sequence[str]) -> list[str]:
    top = max(max(values) for values in panel.series.values()) or 1.0
    parts = [_text(0, -6, panel.title)]
    for tick in range(_TICKS + 1):
        y = _HEIGHT - _HEIGHT * tick / _TICKS
        parts.append(f'<line x1="0" x2="{_WIDTH}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(_text(-6, y + 4, f"{top * tick / _TICKS:.3g}", anchor="end"))
    for number, label in enumerate(labels):
        parts.append(_text(_x(number, labels), _HEIGHT + 18, label, anchor="middle"))
    for row, (name, values) in enumerate(panel.series.items()):
        colour = _COLOURS[row % len(_COLOURS)]
        points = [(_x(i, labels), _HEIGHT * (1 - value / top)) for i, value in enumerate(values)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        parts.append(_text(0, _HEIGHT + 38 + 16 * row, name, colour=colour))
    return parts


def _x(number: int, labels: Sequence[str]) -> float:
    return _WIDTH * (number + 0.5) / len(labels)


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "#222"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{colour}">{escape(text)}</text>'
    )
