"""Few of the layers of a deep model, in the place of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from tpplan.language import PlanError
from tpplan.models import RUNNABLE, ModelError, made_runnable, size_of
from tpplan.planner.match import Matches
from tpplan.simulate.folding import Fold, find_folds, shortened_model
from tpplan.suggestion.anatomy import Anatomy, anatomy_of
from tpplan.suggestion.bench import bench_for
from tpplan.suggestion.patterns import Names
from tpplan.suggestion.traced import trace_of


def shortened(model: nn.Module, inputs: Any, tp: int) -> tuple[Sequence[Fold], nn.Module, Anatomy]:
    """How a deep model is folded, what is left of it, and the anatomy of the whole."""
    folds = find_folds(model, Matches({}, {}, (), {}))
    if folds:
        short = shortened_model(model, dict.fromkeys(folds, 0))
        try:
            bench = bench_for(short, model, inputs)
            anatomy = anatomy_of(short, trace_of(short, inputs), tp, bench)
            return folds, short, _unfolded(anatomy, folds, model)
        except PlanError:
            pass  # its code may count what was left out
    bench = bench_for(model, model, inputs)
    return (), model, anatomy_of(model, trace_of(model, inputs), tp, bench)


def _unfolded(anatomy: Anatomy, folds: Sequence[Fold], model: nn.Module) -> Anatomy:
    """The anatomy of the model from that of one with few of equal layers."""
    copies: dict[str, list[str]] = {}
    for path in Names(model).places:
        copies.setdefault(_source(path, folds), []).append(path)
    for slot in anatomy.slots:
        slot.members = {
            role: tuple(copy for path in paths for copy in copies[path])
            for role, paths in slot.members.items()
        }
    elements = tuple(copy for path in anatomy.elements for copy in copies[path])
    return replace(anatomy, elements=elements)


def _source(path: str, folds: Sequence[Fold]) -> str:
    """The path in the short model of what stands for a module or a parameter."""
    for fold in folds:
        if path.startswith(f"{fold.stack}."):
            number, dot, rest = path[len(fold.stack) + 1 :].partition(".")
            return f"{fold.stack}.{fold.source(int(number))}{dot}{rest}"
    return path


def stand_in(
    model: nn.Module, short: nn.Module, anatomy: Anatomy, inputs: Any, tp: int
) -> nn.Module:
    """What plans are tried on: of a large model the same code made small, if that has it all."""
    if size_of(short) <= RUNNABLE or inputs is not None:
        return short
    try:
        small, _ = made_runnable(model)
        bench = bench_for(small, small, None)
        same = anatomy_of(small, trace_of(small, None, again=False), tp, bench)
    except (ModelError, PlanError):
        return short
    told = {slot.name: slot.variants for slot in anatomy.slots}
    return small if told == {slot.name: slot.variants for slot in same.slots} else short
