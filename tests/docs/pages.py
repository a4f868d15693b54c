"""The pages of docs/, and the code blocks on them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
_BLOCK = re.compile(
    r"(?:^<!-- onto: (?P<onto>.*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    flags=re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        line: where it begins on the page.
        onto: the model that a comment above it names, which no reader sees.
    """

    line: int
    language: str
    text: str
    onto: str | None = None


def page(name: str) -> str:
    """A page's text."""
    return (DOCS / name).read_text()


def blocks(name: str, *languages: str) -> list[Block]:
    """A page's code blocks, in order."""
    text = page(name)
    return [
        Block(text.count("\n", 0, m.start()) + 1, m["language"], m["text"], m["onto"])
        for m in _BLOCK.finditer(text)
        if not languages or m["language"] in languages
    ]
