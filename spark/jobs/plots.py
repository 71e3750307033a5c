"""Plots as pages of their own: HTML with SVG in it, which load nothing from anywhere."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cometmq.shm.os.durable import replace_file

WIDTH: Final = 960
HEIGHT: Final = 120
_PAGE: Final = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>CometMQ: {title}</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 2em; color: #222; }}
h2 {{ font-size: 15px; margin: 1.5em 0 .3em; }} p {{ margin: .2em 0; color: #666; }}
svg {{ background: #f6f7f9; }} rect {{ fill: #3b6fb6; }} rect:hover {{ fill: #d9822b; }}
polyline {{ fill: none; stroke: #3b6fb6; stroke-width: 1.5; }}
circle {{ fill: #3b6fb6; }} circle:hover {{ fill: #d9822b; }}
text {{ font-size: 11px; fill: #666; }}
</style></head><body>
<h1>{title}</h1>
<p>{summary}</p>
{plots}
</body></html>
"""


def write_page(path: Path, title: str, summary: str, plots: Sequence[str]) -> None:
    """In one step: who looks while it is written anew sees the old page or the new one."""
    page = _PAGE.format(
        title=html.escape(title), summary=html.escape(summary), plots="\n".join(plots)
    )
    replace_file(path, page.encode(), mode=0o666)


def drawing(name: str, note: str, shapes: Sequence[str], first: str, last: str) -> str:
    """One plot: its name, a note, and what `shapes` draw within WIDTH x HEIGHT; below it where the
    axis begins and ends."""
    return (
        f"<h2>{html.escape(name)}</h2><p>{html.escape(note)}</p>"
        f'<svg width="{WIDTH}" height="{HEIGHT + 16}">{"".join(shapes)}'
        f'<text x="0" y="{HEIGHT + 12}">{html.escape(first)}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + 12}" text-anchor="end">{html.escape(last)}</text></svg>'
    )


def bar(x: float, width: float, share: float, text: str) -> str:
    """From the bottom up to that share of the height."""
    height = HEIGHT * share
    return (
        f'<rect x="{x:.2f}" y="{HEIGHT - height:.2f}" width="{max(0.5, width):.2f}" '
        f'height="{height:.2f}"><title>{html.escape(text)}</title></rect>'
    )


def line(points: Sequence[tuple[float, float, str]]) -> list[str]:
    """Through points of (x, share of the height, what it says where the mouse is)."""
    placed = [(x, HEIGHT - HEIGHT * share, text) for x, share, text in points]
    shapes = [f'<polyline points="{" ".join(f"{x:.2f},{y:.2f}" for x, y, _ in placed)}"/>']
    return shapes + [
        f'<circle cx="{x:.2f}" cy="{y:.2f}" r="2.5"><title>{html.escape(text)}</title></circle>'
        for x, y, text in placed
    ]
