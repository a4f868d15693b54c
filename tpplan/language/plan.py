"""A plan as immutable data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tpplan.language.diagnostics import Diagnostic, PlanError, Position, did_you_mean
from tpplan.language.patterns import Pattern
from tpplan.language.styles import (
    GATHERED,
    OVERLAP_CHOICES,
    RECOMPUTE_CHOICES,
    SAVE_CHOICES,
    WAITING,
)

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
        overlap: how products run beside the collectives that bring or take their tensors.
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
    overlap: str = WAITING
    recompute: tuple[str, ...] = ()

    def keeping(
        self,
        save: str | None = None,
        recompute: Iterable[str] | None = None,
        overlap: str | None = None,
    ) -> Plan:
        """The plan with these in the place of its own, where they are given.

        Raises:
            PlanError: where there is no such word.
        """
        words = () if recompute is None else tuple(recompute)
        _require(save, SAVE_CHOICES, "save: there is no")
        _require(overlap, OVERLAP_CHOICES, "overlap: there is no")
        for word in words:
            _require(word, RECOMPUTE_CHOICES, "recompute: there is no")
        return replace(
            self,
            save=self.save if save is None else save,
            recompute=self.recompute if recompute is None else words,
            overlap=self.overlap if overlap is None else overlap,
        )


def _require(word: str | None, choices: tuple[str, ...], refusal: str) -> None:
    if word is not None and word not in choices:
        hint = did_you_mean(word, choices, f"there is {' and '.join(choices)}")
        raise PlanError([Diagnostic(f"{refusal} '{word}'", hint=hint)])


def as_written(value: Any) -> Any:
    """An option's value as a plan file has it."""
    if isinstance(value, Mapping):
        if "sizes" in value:  # parts that are told with how large each is
            parts = zip(value["parts"], value["sizes"], strict=True)
            return {name: as_written(size) for name, size in parts}
        return {key: as_written(item) for key, item in value.items()}
    return [as_written(item) for item in value] if isinstance(value, tuple | list) else value
