"""Patterns for module paths.

A pattern is a dotted path. Within a segment ``*`` stands for any characters, ``?`` for one,
``[..]`` for one of a set; ``{a,b}`` are alternatives and may span dots; ``**`` is zero or more
whole segments. ``.`` alone, and nothing else, is the model itself, whose path is empty.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tpplan.language.diagnostics import TextError

MAX_ALTERNATIVES = 256
MAX_LENGTH = 1000
MAX_NESTING = 16
ROOT = "."

_Element = TypeVar("_Element")
_Part = TypeVar("_Part")


class PatternError(TextError):
    """A text that is not a pattern."""


class Sign(enum.Enum):
    """What is not a literal character or a set."""

    STAR = "*"
    ANY = "?"
    DOUBLE_STAR = "**"
    DOT = "."


@dataclass(frozen=True)
class CharacterSet:
    """One character of a set: ``[abc]``, ``[a-f0-9]``, ``[!x]``."""

    ranges: tuple[tuple[str, str], ...]
    negated: bool

    def __contains__(self, character: str) -> bool:
        inside = any(low <= character <= high for low, high in self.ranges)
        return inside != self.negated


@dataclass(frozen=True)
class Token:
    """A literal character, a sign or a set, with its own text and where it stands."""

    value: str | Sign | CharacterSet
    text: str
    offset: int = field(compare=False)

    def accepts(self, character: str) -> bool:
        """Whether it stands for this one character."""
        if isinstance(self.value, CharacterSet):
            return character in self.value
        return self.value is Sign.ANY or self.value == character


@dataclass(frozen=True)
class Segment:
    """What stands between two dots, without alternatives."""

    tokens: tuple[Token, ...]
    text: str = field(init=False)
    literal: bool = field(init=False)
    spans: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", "".join(token.text for token in self.tokens))
        object.__setattr__(self, "literal", all(isinstance(t.value, str) for t in self.tokens))
        spans = any(token.value is Sign.DOUBLE_STAR for token in self.tokens)
        object.__setattr__(self, "spans", spans)

    def matches(self, name: str) -> bool:
        """Whether one segment of a path fits; ``**`` is not for this method."""
        if self.literal:
            return name == self.text
        return wildcard_match(self.tokens, lambda t: t.value is Sign.STAR, name, Token.accepts)


@dataclass(frozen=True)
class Pattern:
    """A compiled pattern; equal where the text is equal.

    Raises:
        PatternError: where the text is not a pattern.
    """

    text: str
    is_exact: bool = field(init=False, repr=False, compare=False)
    alternatives: tuple[tuple[Segment, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        alternatives = () if self.text == ROOT else _Reader(self.text).read()
        segments = [segment for alternative in alternatives for segment in alternative]
        exact = "{" not in self.text and all(segment.literal for segment in segments)
        object.__setattr__(self, "alternatives", alternatives)
        object.__setattr__(self, "is_exact", exact)

    def __reduce__(self) -> tuple[type[Pattern], tuple[str]]:
        return Pattern, (self.text,)

    def __str__(self) -> str:
        return self.text

    def matches(self, path: str) -> bool:
        """Whether the pattern names this path of a module or parameter."""
        if not path or self.text == ROOT:
            return not path and self.text == ROOT
        if self.is_exact:
            return path == self.text
        names = path.split(".")
        return any(match_segments(alternative, names) for alternative in self.alternatives)


def match_segments(segments: Sequence[Segment], names: Sequence[str]) -> bool:
    """Whether the segments of a pattern fit those of a path."""
    last = segments[-1]
    # Most paths end in another name, which this finds out soonest.
    if not last.spans and not last.matches(names[-1]):
        return False
    return wildcard_match(segments, lambda s: s.spans, names, Segment.matches)


def wildcard_match(
    elements: Sequence[_Element],
    is_wild: Callable[[_Element], bool],
    parts: Sequence[_Part],
    accepts: Callable[[_Element, _Part], bool],
) -> bool:
    """Whether ``elements`` fit ``parts`` one to one, wild ones standing for any number of parts.

    Going back to the latest wild element is enough: whatever an earlier one could give up, the
    latest can take. So the time is at most the product of the lengths, on any input.
    """
    element = part = resume = 0
    wild = -1
    while part < len(parts):
        if element < len(elements) and is_wild(elements[element]):
            wild, resume = element, part
            element += 1
        elif element < len(elements) and accepts(elements[element], parts[part]):
            element += 1
            part += 1
        elif wild >= 0:
            resume += 1
            element, part = wild + 1, resume
        else:
            return False
    return all(is_wild(rest) for rest in elements[element:])


class _Reader:
    """Reads one pattern's text into its alternatives."""

    def __init__(self, text: str) -> None:
        if not text:
            raise PatternError(f"an empty pattern names nothing; '{ROOT}' is the model itself")
        if len(text) > MAX_LENGTH:
            raise PatternError(f"a pattern has at most {MAX_LENGTH} characters", MAX_LENGTH)
        self.text = text
        self.offset = 0

    def read(self) -> tuple[tuple[Segment, ...], ...]:
        found = self.sequence(nesting=0)
        if self.offset < len(self.text):
            raise PatternError("'}' closes nothing", self.offset)
        return tuple(dict.fromkeys(self.segments(tokens) for tokens in found))

    def sequence(self, nesting: int) -> list[tuple[Token, ...]]:
        """Everything up to the end, or up to what ends an alternative."""
        found: list[tuple[Token, ...]] = [()]
        while self.offset < len(self.text):
            character = self.text[self.offset]
            if character == "}" or (character == "," and nesting):
                break
            following = self.braces(nesting) if character == "{" else [(self.token(),)]
            if len(found) * len(following) > MAX_ALTERNATIVES:
                raise self.too_many()
            found = [(*left, *right) for left in found for right in following]
        return found

    def braces(self, nesting: int) -> list[tuple[Token, ...]]:
        start = self.offset
        if nesting == MAX_NESTING:
            raise PatternError("braces are nested too deeply", start)
        if self.text.startswith("{}", start):
            raise PatternError("'{}' holds no alternatives", start)
        found: list[tuple[Token, ...]] = []
        while self.offset < len(self.text) and self.text[self.offset] in "{,":
            self.offset += 1
            found += self.sequence(nesting + 1)
            if len(found) > MAX_ALTERNATIVES:
                raise self.too_many()
        if self.offset == len(self.text):
            raise PatternError("'{' is never closed", start)
        self.offset += 1
        return found

    def too_many(self) -> PatternError:
        message = f"the pattern has more than {MAX_ALTERNATIVES} alternatives"
        return PatternError(message, self.offset)

    def token(self) -> Token:
        start = self.offset
        character = self.text[start]
        if character == "]":
            raise PatternError("']' closes nothing", start)
        value: str | Sign | CharacterSet
        if character == "[":
            value, end = self.character_set(start)
        elif self.text.startswith(Sign.DOUBLE_STAR.value, start):
            value, end = Sign.DOUBLE_STAR, start + 2
        elif character in "*?.":
            value, end = Sign(character), start + 1
        else:
            value, end = character, start + 1
        self.offset = end
        return Token(value, self.text[start:end], start)

    def character_set(self, start: int) -> tuple[CharacterSet, int]:
        """The set that opens at ``start``, and the offset after it."""
        first = start + 1
        negated = self.text.startswith("!", first)
        first += negated
        # A ']' that comes first is a member, as in every shell.
        close = self.text.find("]", first + 1)
        if close < 0:
            raise PatternError("'[' is never closed", start)
        members = self.text[first:close]
        if "." in members:
            message = "a dot separates segments, so it cannot be in '[..]'"
            raise PatternError(message, first + members.index("."))
        ranges: list[tuple[str, str]] = []
        index = 0
        while index < len(members):
            low = high = members[index]
            if members[index + 1 : index + 2] == "-" and index + 2 < len(members):
                high = members[index + 2]
                if low > high:
                    raise PatternError(f"the range '{low}-{high}' is empty", first + index)
                index += 2
            ranges.append((low, high))
            index += 1
        return CharacterSet(tuple(ranges), negated), close + 1

    def segments(self, tokens: Iterable[Token]) -> tuple[Segment, ...]:
        """Split at the dots."""
        parts: list[list[Token]] = [[]]
        end = 0
        for token in tokens:
            end = token.offset + len(token.text)
            if token.value is not Sign.DOT:
                parts[-1].append(token)
                continue
            if not parts[-1]:
                raise PatternError("a segment is empty", token.offset)
            parts.append([])
        if not parts[-1]:
            raise PatternError("a segment is empty", max(0, end - 1))
        for part in parts:
            wide = next((token for token in part if token.value is Sign.DOUBLE_STAR), None)
            if wide is not None and len(part) > 1:
                raise PatternError("'**' must be a whole segment", wide.offset)
        return tuple(Segment(tuple(part)) for part in parts)
