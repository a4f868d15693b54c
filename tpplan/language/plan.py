"""A plan as immutable data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tpplan.language.diagnostics import Diagnostic, PlanError, Position, did_you_mean
from tpplan.language.patterns import Pattern
from tpplan.language.styles import GATHERED, RECOMPUTE_CHOICES, SAVE_CHOICES

_Value = TypeVar("_Value", covariant=True)


class FrozenMap(Mapping[str, _Value]):
    """An immutable mapping that keeps its order, hashes, copies and pickles."""

    __slots__ = ("_entries",)

    def __init__(self, entries: Mapping[str, _Value] | None = None) -> None:
        self._entries = dict(entries or {})

    def __getitem__(self, key: str) -> _Value:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __hash__(self) -> int:
        return hash(frozenset(self._entries.items()))

    def __repr__(self) -> str:
        return repr(self._entries)


@dataclass(frozen=True)
class Rule:
    """What becomes of the modules that a pattern names.

    Attributes:
        options: the style's options; lists are tuples, ``packed`` is a mapping with ``parts``
            and, where the plan says so, ``repeat``.
        optional: the pattern may match nothing.
        position: of the pattern.
        option_positions: of the options' names.
    """

    pattern: Pattern
    style: str
    options: Mapping[str, object]
    optional: bool
    position: Position
    option_positions: Mapping[str, Position]


@dataclass(frozen=True)
class Plan:
    """A plan that was read and found to be well formed.

    Attributes:
        name: the file's name, or what the caller called it.
        path: of the file, None where there is none.
        rules: in the order of the source, inherited ones first.
        layers: the pattern of the layer stack, where the plan names it.
        kernels: kernel kind -> implementation; kinds that no plan mentions are absent.
        text: the source of this plan, without that of the plan it extends.
        recompute: what is computed again in backward, in the place of being kept for products.
        save: what column-parallel layers keep of a gathered input for backward: it, or the shard.
    """

    name: str
    path: str | None
    description: str
    models: tuple[str, ...]
    sequence_parallel: bool
    rules: tuple[Rule, ...]
    layers: Pattern | None
    layers_position: Position | None
    sequence_dim: int
    kernels: Mapping[str, str]
    text: str
    save: str = GATHERED
    recompute: tuple[str, ...] = ()

    def keeping(self, save: str | None, recompute: Iterable[str] | None = None) -> Plan:
        """The plan with these in the place of its own, where they are given.

        Raises:
            PlanError: where there is no such word.
        """
        words = () if recompute is None else tuple(recompute)
        if save is not None and save not in SAVE_CHOICES:
            hint = did_you_mean(save, SAVE_CHOICES, f"there is {' and '.join(SAVE_CHOICES)}")
            raise PlanError([Diagnostic(f"save: there is no '{save}'", hint=hint)])
        for word in words:
            if word not in RECOMPUTE_CHOICES:
                known = f"there is {' and '.join(RECOMPUTE_CHOICES)}"
                hint = did_you_mean(word, RECOMPUTE_CHOICES, known)
                raise PlanError([Diagnostic(f"recompute: there is no '{word}'", hint=hint)])
        save = self.save if save is None else save
        return replace(self, save=save, recompute=self.recompute if recompute is None else words)


def as_written(value: Any) -> Any:
    """An option's value as a plan file has it."""
    if isinstance(value, Mapping):
        if "sizes" in value:  # parts that are told with how large each is
            parts = zip(value["parts"], value["sizes"], strict=True)
            return {name: as_written(size) for name, size in parts}
        return {key: as_written(item) for key, item in value.items()}
    return [as_written(item) for item in value] if isinstance(value, tuple | list) else value
