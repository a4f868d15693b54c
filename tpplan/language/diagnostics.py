"""What is wrong with a plan, and where: positions, diagnostics, and the error that carries them."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field

SNIPPET_WIDTH = 100
QUOTE_LIMIT = 80
_LONGEST_SUGGESTED = 200


@dataclass(frozen=True)
class Position:
    """A place in a plan's source; line and column count from 1.

    Attributes:
        text: the whole source line.
        length: how many characters from ``column`` on are meant.
    """

    file: str
    line: int
    column: int
    text: str
    length: int = 1

    def __str__(self) -> str:
        return f"{printable(self.file)}:{self.line}:{self.column}"

    def snippet(self) -> list[str]:
        """The source line with carets under what is meant; nothing where the line is blank."""
        if not self.text.strip():
            return []
        before, marked, after = self._clipped()
        gutter = max(5, len(str(self.line)))
        carets = " " * _width(before) + "^" * max(1, _width(marked))
        return [
            f"{self.line:>{gutter}} | {before}{marked}{after}".rstrip(),
            f"{'':>{gutter}} | {carets}",
        ]

    def _clipped(self) -> tuple[str, str, str]:
        """The line before, within and after the marked part, cut to a readable width."""
        size = len(self.text)
        start = min(self.column - 1, size)
        left = max(0, min(start - SNIPPET_WIDTH // 3, size - SNIPPET_WIDTH))
        right = min(left + SNIPPET_WIDTH, size)
        end = min(start + self.length, right)
        before = ("..." if left else "") + printable(self.text[left:start])
        after = printable(self.text[end:right]) + ("..." if right < size else "")
        return before, printable(self.text[start:end]), after


@dataclass(frozen=True)
class Diagnostic:
    """One problem: what is wrong, where, what to do, and the other places it has to do with.

    Attributes:
        about: the paths in the model that it is about, where these are known.
    """

    message: str
    position: Position | None = None
    hint: str | None = None
    related: tuple[tuple[str, Position], ...] = ()
    about: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def render(self) -> str:
        """The problem as text, with the offending lines."""
        place = "" if self.position is None else f"{self.position}: "
        lines = [f"{place}error: {self.message}"]
        if self.position is not None:
            lines += self.position.snippet()
        for message, position in self.related:
            lines += [f"{position}: note: {message}", *position.snippet()]
        if self.hint is not None:
            lines.append(f"   help: {self.hint}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()


class PlanError(ValueError):
    """A plan cannot be used; ``diagnostics`` holds everything that is wrong with it."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics: tuple[Diagnostic, ...] = tuple(diagnostics)
        super().__init__(self.diagnostics)

    def __str__(self) -> str:
        return "\n\n".join(diagnostic.render() for diagnostic in self.diagnostics)


class TextError(ValueError):
    """Something is wrong within a short text, ``offset`` characters into it."""

    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(message, offset)
        self.message = message
        self.offset = offset

    def __str__(self) -> str:
        return self.message


class Reporter:
    """What is found wrong while reading on: ``problems``."""

    def __init__(self) -> None:
        self.problems: list[Diagnostic] = []

    def report(
        self,
        message: str,
        position: Position,
        hint: str | None = None,
        related: Iterable[tuple[str, Position]] = (),
    ) -> None:
        """Note a problem."""
        self.problems.append(Diagnostic(message, position, hint, tuple(related)))


def suggest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that ``word`` was probably meant to be."""
    if len(word) > _LONGEST_SUGGESTED:
        return None
    lowered = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return lowered[close[0]] if close else None


def did_you_mean(word: str, choices: Iterable[str], otherwise: str | None = None) -> str | None:
    """A hint with the nearest choice, or else ``otherwise``."""
    guess = suggest(word, choices)
    return otherwise if guess is None else f"did you mean '{guess}'?"


def quoted(text: str) -> str:
    """A piece of the user's text, fit for a message."""
    if len(text) > QUOTE_LIMIT:
        text = text[: QUOTE_LIMIT - 3] + "..."
    return f"'{printable(text)}'"


def printable(text: str) -> str:
    """``text``, character for character, without what would upset a terminal."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)


def _width(text: str) -> int:
    """The columns ``text`` takes on a terminal."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) - sum(bool(unicodedata.combining(c)) for c in text) + wide
