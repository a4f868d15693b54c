"""The pattern that a pattern matching nothing was probably meant to be."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tpplan.language.patterns import ROOT, Pattern, PatternError, Segment

# What an edit of one segment costs; a pattern more than WORTH_SAYING away is another pattern.
_INSERT = 0.7
_DELETE = 0.8
_SUBSTITUTE = 1.2
_LEAST_SIMILAR = 0.5
_RENUMBER = 0.3
# Breaks ties: a wildcard was meant for the number rather than for a name.
_WILDCARD_FOR_NAME = 0.01
_WORTH_SAYING = 1.5

_MAX_SHAPES = 2000
_MAX_ALTERNATIVES = 8
_ANY_NUMBER = "*"
_SPANNING = "**"


@dataclass(frozen=True)
class _Shape:
    """Paths that differ only in numbers: ``names`` with ``*`` for those, and what they were."""

    names: tuple[str, ...]
    numbers: tuple[set[str], ...]

    def candidates(self, index: int) -> Iterable[str]:
        return self.numbers[index] or (self.names[index],)


@dataclass
class _Piece:
    """One segment of a pattern, with its alternatives."""

    text: str
    alternatives: tuple[Segment, ...]
    similarities: dict[str, float] = field(default_factory=dict)

    def fits(self, names: Iterable[str]) -> bool:
        return any(segment.matches(name) for name in names for segment in self.alternatives)

    def similarity(self, name: str) -> float:
        if name not in self.similarities:
            ratios = (_ratio(segment.text, name) for segment in self.alternatives)
            self.similarities[name] = max(ratios)
        return self.similarities[name]


# A segment of the answer, or the piece to replace and the place of what replaces it.
_Edit = str | tuple[_Piece, int]


def nearest(pattern: Pattern, paths: Iterable[str]) -> str | None:
    """A pattern close to ``pattern`` that does match one of ``paths``, or None.

    Numbers in paths are taken as interchangeable, so the answer speaks of ``layers.*``.
    """
    if pattern.text == ROOT:
        return None
    known = list(paths)
    shapes = _shapes(known)
    least = _WORTH_SAYING
    guesses: list[str] = []
    for pieces in _pieces(pattern):
        for shape in shapes:
            cost, edits = _align(pieces, shape)
            if cost < least:
                least = cost
                guesses = [".".join(_written(edit, shape, shapes) for edit in edits)]
    if not pattern.text.startswith(_SPANNING):
        guesses.append(f"{_SPANNING}.{pattern.text}")
    for guess in guesses:
        if guess != pattern.text and _matches_some(guess, known):
            return guess
    return None


def _matches_some(text: str, paths: Iterable[str]) -> bool:
    with contextlib.suppress(PatternError):
        return any(map(Pattern(text).matches, paths))
    return False


def _shapes(paths: Iterable[str]) -> list[_Shape]:
    shapes: dict[tuple[str, ...], _Shape] = {}
    for path in paths:
        names = path.split(".")
        folded = tuple(_ANY_NUMBER if name.isdigit() else name for name in names)
        shape = shapes.get(folded)
        if shape is None:
            if len(shapes) == _MAX_SHAPES or not path:
                continue
            shape = shapes[folded] = _Shape(folded, tuple(set() for _ in names))
        for name, numbers in zip(names, shape.numbers, strict=True):
            if name.isdigit():
                numbers.add(name)
    return list(shapes.values())


def _pieces(pattern: Pattern) -> list[list[_Piece]]:
    """The pattern's segments with their alternatives; apart where alternatives span dots."""
    texts = _split(pattern.text)
    try:
        patterns = [Pattern(text) for text in texts]
    except PatternError:
        return []
    if all(len(a) == 1 for p in patterns for a in p.alternatives):
        segments = [tuple(a[0] for a in p.alternatives[:_MAX_ALTERNATIVES]) for p in patterns]
        return [[_Piece(p.text, s) for p, s in zip(patterns, segments, strict=True)]]
    alternatives = pattern.alternatives[:_MAX_ALTERNATIVES]
    return [[_Piece(s.text, (s,)) for s in alternative] for alternative in alternatives]


def _split(text: str) -> list[str]:
    """Split at the dots that are not within braces."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if character == "." and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _align(pieces: Sequence[_Piece], shape: _Shape) -> tuple[float, tuple[_Edit, ...]]:
    """The cheapest edit of the pieces that fits the shape."""
    width = len(shape.names)
    cells: list[list[tuple[float, tuple[_Edit, ...]]]]
    cells = [[(math.inf, ())] * (width + 1) for _ in range(len(pieces) + 1)]
    cells[0][0] = (0.0, ())
    for i, row in enumerate(cells):
        for j, (cost, edits) in enumerate(row):
            if cost >= _WORTH_SAYING:
                continue
            for down, right, more, added in _steps(pieces, i, shape, j):
                if cost + more < cells[i + down][j + right][0]:
                    cells[i + down][j + right] = (cost + more, edits + added)
    return cells[-1][-1]


def _steps(
    pieces: Sequence[_Piece], i: int, shape: _Shape, j: int
) -> Iterator[tuple[int, int, float, tuple[_Edit, ...]]]:
    """What may become of piece ``i`` and name ``j``: how far to go in both, the cost, the edits."""
    more_names = j < len(shape.names)
    if more_names:
        yield 0, 1, _INSERT, (shape.names[j],)
    if i == len(pieces):
        return
    piece = pieces[i]
    if piece.text == _SPANNING:
        yield 1, 0, 0.0, (piece.text,)
        if more_names:
            yield 0, 1, 0.0, ()
        return
    # Without its last segment a pattern would name something else: the container.
    if i + 1 < len(pieces):
        yield 1, 0, _DELETE, ()
    if more_names and piece.fits(shape.candidates(j)):
        meant = bool(shape.numbers[j]) or piece.text != _ANY_NUMBER
        yield 1, 1, 0.0 if meant else _WILDCARD_FOR_NAME, (piece.text,)
    elif more_names:
        yield 1, 1, _change(piece, shape, j), ((piece, j),)


def _change(piece: _Piece, shape: _Shape, index: int) -> float:
    if shape.numbers[index]:
        return _RENUMBER if piece.text.isdigit() else math.inf
    similarity = piece.similarity(shape.names[index])
    return _SUBSTITUTE - similarity if similarity >= _LEAST_SIMILAR else math.inf


def _written(edit: _Edit, shape: _Shape, shapes: Sequence[_Shape]) -> str:
    """A segment of the answer: for each alternative the most similar name among the siblings."""
    if isinstance(edit, str):
        return edit
    piece, index = edit
    if shape.numbers[index]:
        return _ANY_NUMBER
    prefix = shape.names[:index]
    siblings = {
        s.names[index] for s in shapes if len(s.names) > index and s.names[:index] == prefix
    }
    chosen = []
    for segment in piece.alternatives:
        name = max(sorted(siblings), key=lambda sibling: _ratio(segment.text, sibling))
        if _ratio(segment.text, name) >= _LEAST_SIMILAR and name not in chosen:
            chosen.append(name)
    return _joined(chosen) if chosen else shape.names[index]


def _joined(names: list[str]) -> str:
    """One text for several names: ``{q,k}_proj``."""
    if len(names) == 1:
        return names[0]
    start = _common_start(names)
    rest = [name[len(start) :] for name in names]
    end = _common_start([name[::-1] for name in rest])[::-1]
    middles = [name[: len(name) - len(end)] for name in rest]
    return f"{start}{{{','.join(middles)}}}{end}"


def _common_start(names: Sequence[str]) -> str:
    lowest, highest = min(names), max(names)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(lowest, highest, strict=False))
    return "".join(left for left, _ in same)


def _ratio(text: str, name: str) -> float:
    return difflib.SequenceMatcher(None, name.lower(), text.lower(), autojunk=False).ratio()
