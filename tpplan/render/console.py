"""What a terminal shows: tables, and the same as plain text."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType
from rich.table import Table


def plain(layout: RenderableType, width: int = 120) -> str:
    """What a rich console would show, without colours."""
    stream = io.StringIO()
    Console(file=stream, width=width, no_color=True).print(layout)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def titled(title: str) -> Table:
    """An empty table without lines."""
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
