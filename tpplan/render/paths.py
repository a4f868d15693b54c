"""Texts with paths of modules in them, equal layers named once."""

from __future__ import annotations

import re
from collections import Counter

_INDEX = re.compile(r"(?<=[A-Za-z_])(?:\.\d+)+(?!\w)")
_PATH = r"[\w*-]+(?:\.[\w*-]+)*"
_LIST = re.compile(rf"{_PATH}(?:, {_PATH})+")


def folded_text(text: str) -> str:
    """A text with layer numbers replaced by ``*``, and paths that are then equal listed once."""
    starred = _INDEX.sub(lambda match: ".*" * match[0].count("."), text)
    return _LIST.sub(_counted, starred)


def _counted(match: re.Match[str]) -> str:
    found = Counter(match[0].split(", "))
    return ", ".join(path if n == 1 else f"{path} ({n} of them)" for path, n in found.items())
