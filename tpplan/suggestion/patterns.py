"""Rules as a person would write them: what repeats is one pattern, what is alike one line."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from tpplan.language import Pattern
from tpplan.language.patterns import ROOT
from tpplan.suggestion.draft import Decision

_Found = tuple[str, frozenset[str]]
_MANY, _WIDE, _LONGEST = 400, 900, 80


class Names:
    """All that a pattern may match in a model, under all of its names."""

    def __init__(self, model: nn.Module) -> None:
        first: dict[int, str] = {}
        self.modules = {
            path: first.setdefault(id(module), path)
            for path, module in model.named_modules(remove_duplicate=False)
        }
        self.tensors = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        self.tensors += [name for name, _ in model.named_buffers()]
        order: dict[str, None] = {}
        for path, module in model.named_modules():
            order[path] = None
            own = (*module._parameters, *module._buffers)
            order.update(dict.fromkeys(f"{path}.{leaf}".lstrip(".") for leaf in own))
        self.places = {name: i for i, name in enumerate(order)}
        self.values = frozenset(self.tensors)
        self._known: dict[str, frozenset[str]] = {}

    def matched(self, text: str) -> frozenset[str]:
        """The modules a pattern matches, else the parameters and buffers, as a plan's rule does."""
        if text not in self._known:
            pattern = Pattern(text)
            found = {self.modules[path] for path in self.modules if pattern.matches(path)}
            found = found or {name for name in self.tensors if pattern.matches(name)}
            self._known[text] = frozenset(found)
        return self._known[text]


def patterns_of(
    decisions: Mapping[str, Decision], names: Names
) -> list[tuple[str, Decision, tuple[str, ...]]]:
    """Few patterns for all decisions, in the order of these: each with the paths that it is for."""
    alike: dict[str, list[str]] = {}
    kinds: dict[str, Decision] = {}
    ordered = sorted(decisions, key=lambda path: names.places.get(path, len(names.places)))
    decisions = {path: decisions[path] for path in ordered}
    for path, decision in decisions.items():
        key = repr((decision.style, dict(decision.options), decision.why))
        alike.setdefault(key, []).append(path)
        kinds[key] = decision
    found = []
    order = {path: i for i, path in enumerate(decisions)}
    for key, paths in alike.items():
        texts = _joined(_starred(paths, names), set(paths), names, order)
        found += [(text, kinds[key], tuple(p for p in paths if p in of)) for text, of in texts]
    return sorted(found, key=lambda rule: order[rule[2][0]])


def _starred(paths: Sequence[str], names: Names) -> list[_Found]:
    """Patterns with ``*`` for the numbers of layers, wherever nothing else is matched by it."""
    left = list(paths)
    found: list[_Found] = []
    while left:
        text, wanted = left[0], set(left)  # what another pattern has it has alone
        for at, step in enumerate(left[0].split(".")):
            steps = text.split(".")
            steps[at] = "*" if step.isdigit() else step
            wider = ".".join(steps)
            if wider == text or len(steps) == 1:
                continue
            first = "*" not in text and "{" not in text
            more = first or len(names.matched(wider)) > len(names.matched(text))
            if more and _only(wider, wanted, names):
                text = wider
            else:
                text = _numbered(text, at, wanted, names)
        of = names.matched(text) if text != left[0] else frozenset([left[0]])
        found.append((text or ROOT, of))  # of the model itself the path is empty
        left = [path for path in left if path not in of]
    return found


def _numbered(text: str, at: int, wanted: set[str], names: Names) -> str:
    """The pattern with the numbers of those that are wanted among others in the place of one."""
    steps = text.split(".")
    any_number = Pattern(".".join([*steps[:at], "*", *steps[at + 1 :]]))
    numbers = sorted({int(p.split(".")[at]) for p in wanted if any_number.matches(p)})
    wider = ".".join([*steps[:at], f"{{{','.join(map(str, numbers))}}}", *steps[at + 1 :]])
    fits = 1 < len(numbers) < _MANY and len(wider) < _WIDE and _only(wider, wanted, names)
    return wider if fits else text


def _only(text: str, wanted: set[str], names: Names) -> bool:
    """Whether a pattern matches nothing but what is wanted."""
    found = names.matched(text)
    return bool(found) and found <= wanted


def _all(text: str, members: list[_Found], wanted: set[str], names: Names) -> bool:
    """Whether it matches what its members do; of modules and parameters it takes the modules."""
    both = frozenset[str]().union(*(of for _, of in members))
    return _only(text, wanted, names) and both <= names.matched(text)


def _joined(
    texts: list[_Found], wanted: set[str], names: Names, order: Mapping[str, int]
) -> list[_Found]:
    """Patterns that differ in one step as one with braces, if it matches nothing else.

    Those first whose names end alike.
    """
    for from_end, endings in itertools.product((1, 2, 3, 4, 5), (True, False)):
        groups: dict[object, list[_Found]] = {}
        for text, of in texts:
            # a pattern that matches a module is of no parameter
            key = _alike(text, from_end, endings), min(of) in names.values
            last = groups.get(key, [])[-1:]
            # outside of layers only what nothing else lies between
            apart = last and max(map(order.__getitem__, last[0][1])) + 1 != min(
                map(order.__getitem__, of)
            )
            groups.setdefault(text if apart and "*" not in text else key, []).append((text, of))
        texts = [one for found in groups.values() for one in _one(found, from_end, wanted, names)]
    return texts


def _alike(text: str, from_end: int, endings: bool) -> object:
    """Equal for patterns that differ in that step alone."""
    steps = text.split(".")
    at = len(steps) - from_end
    if at < 0 or (at == 0 and from_end == 1) or "{" in steps[at] or steps[at] == "*":
        return text
    end = steps[at].rpartition("_")[2] if endings else ""
    return at, end, *steps[:at], "", *steps[at + 1 :]


def _one(members: list[_Found], from_end: int, wanted: set[str], names: Names) -> list[_Found]:
    """Patterns as one, where that is short and matches what they do."""
    steps = [text.split(".") for text, _ in members]
    at = len(steps[0]) - from_end
    if len(members) == 1:
        return members
    braces = _braces([s[at] for s in steps])
    one = ".".join([*steps[0][:at], braces, *steps[0][at + 1 :]])
    fits = len(one) <= _LONGEST and _all(one, members, wanted, names)
    return [(one, names.matched(one))] if fits else members


def _braces(words: Sequence[str]) -> str:
    """The words with what they share outside of the braces, up to an underscore."""
    front = _shared(words)
    back = _shared([word[len(front) :][::-1] for word in words])[::-1]
    front, back = _whole(front, words, True), _whole(back, words, False)
    inner = [word[len(front) : len(word) - len(back)] for word in words]
    return f"{front}{{{','.join(inner)}}}{back}"


def _shared(words: Sequence[str]) -> str:
    """What all words begin with."""
    pairs = zip(min(words), max(words), strict=False)
    return "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _whole(shared: str, words: Iterable[str], front: bool) -> str:
    """What words share, cut where a part of their names ends."""
    if front:
        digits = all(word[len(shared) :].isdigit() for word in words)
        return shared if digits else shared[: shared.rfind("_") + 1]
    at = shared.find("_")
    return "" if at < 0 else shared[at:]
