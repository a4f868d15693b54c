"""Where a model's code stopped that ran as a rank's, and what kind of thing it stopped at."""

from __future__ import annotations

import enum
import linecache
import sysconfig
import traceback
from pathlib import Path

import torch

from tpplan.compat import NeedsValuesError
from tpplan.language import Position

_OURS = (Path(torch.__file__).parent, Path(__file__).parents[1])
_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_INSTALLED = {"site-packages", "dist-packages"}
_SIZES = (
    "shape",
    "size",
    "split",
    "unpack",
    "unflatten",
    "dimension",
    "must match",
    "multiply",
    "view",
)
_ENTRIES = ("index out of range in self", "out of bounds")
WITHOUT_NUMBERS = (
    "code that asks for the numbers in a tensor cannot be traced: give inputs= that do without it"
)


class Stop(enum.Enum):
    """What the model's code stopped at."""

    SIZES = "sizes that do not go together"
    ENTRY = "an entry that a table does not have"
    NUMBERS = "code that asks for numbers, where there are none"
    CODE = "anything else"


def kind_of(error: Exception) -> Stop:
    """Told by its class and, where that says little, by its words."""
    place = place_of(error) if isinstance(error, AssertionError) else None
    text = str(error) if place is None else f"{error} {place.text}"
    if isinstance(error, NeedsValuesError) or "_local_scalar_dense" in text:
        return Stop.NUMBERS
    if any(words in text for words in _ENTRIES):
        return Stop.ENTRY
    if isinstance(error, TypeError | LookupError | AttributeError | NameError):
        return Stop.CODE
    return Stop.SIZES if any(word in text.lower() for word in _SIZES) else Stop.CODE


def place_of(error: BaseException) -> Position | None:
    """The line of the model's code at which an error was raised; None where that is unknown."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if _is_the_models(f.filename)), None)
    if frame is None or frame.lineno is None:
        return None
    return line_of(frame.filename, frame.lineno)


def line_of(file: str, number: int) -> Position:
    """A line of the model's code."""
    text = linecache.getline(file, number).rstrip("\n")
    path, said = Path(file), text.strip()
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    column = len(text) - len(text.lstrip()) + 1
    return Position(str(shown), number, column, text, max(1, len(said)))


def stopped_at(place: Position | None) -> tuple[tuple[str, Position], ...]:
    """What a diagnostic notes of it."""
    return () if place is None else (("in the model's code", place),)


def _is_the_models(file: str) -> bool:
    path = Path(file)
    if file.startswith("<frozen") or any(path.is_relative_to(ours) for ours in _OURS):
        return False
    library = path.is_relative_to(_LIBRARY) and not _INSTALLED & set(path.parts)
    return not library
