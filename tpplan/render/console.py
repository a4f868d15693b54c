"""What a terminal shows: tables, and the same as plain text."""

from __future__ import annotations

import io
from typing import Literal

from rich.console import Console, RenderableType
from rich.table import Table

# columns that are broken where they are long, and all that hold words; numbers stand right
_LONG = {"parameter", "for", "how", "beside"}
_WORDS = {
    *("", "shape", "placement", "per rank", "rule", "phase", "module", "collective", "computes"),
    *_LONG,
}


def plain(layout: RenderableType, width: int = 120) -> str:
    """What a rich console would show, without colours."""
    stream = io.StringIO()
    Console(file=stream, width=width, no_color=True).print(layout)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def titled(title: str) -> Table:
    """An empty table without lines."""
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)


def columned(title: str, *columns: str) -> Table:
    """A table whose numbers stand right, and whose long words are broken."""
    table = titled(title)
    for name in columns:
        justify: Literal["left", "right"] = "left" if name in _WORDS else "right"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name not in _LONG)
    return table
