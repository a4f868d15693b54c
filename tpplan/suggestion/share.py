"""One rank's share of a region, run by itself: which numbers that code reads are its own.

A rank has some of the rows of each weight. Code that views columns as so many heads, or splits
them at some width, has to be told of fewer: which of its attributes these are is found by running
it with each, until it gives what the whole of it gives that rank.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from tpplan.language import Expression
from tpplan.observe.calls import Call
from tpplan.planner.attributes import assign, integers, named_in_code
from tpplan.suggestion.bench import Hook, run_until, tensors_of
from tpplan.suggestion.hanging import Cut, Hanging, Part

_TRIED = 600
_NEAR = 1e-4
_OWN = frozenset({"heads", "kv_heads", "head_dim", "tp"})


@dataclass(frozen=True)
class Change:
    """An attribute of a module, and its value on each of ``tp`` ranks as a plan says it."""

    module: str
    name: str
    text: str
    value: int


def heads_of(seen: Hanging) -> int:
    """How many heads there are, where something has a number for each; 0 where nothing has."""
    parts = [part for cut in seen.cuts.values() for part in cut.parts]
    alone = (p.units for p in parts if p.width == 1 and p.units < seen.width)
    return min(alone, default=0)


def by_heads(part: Part, heads: int) -> Part:
    """The part with heads for units, where each has several."""
    if heads and part.units > heads and part.units % heads == 0:
        return Part(heads, part.units // heads * part.width)
    return part


def changes_for(
    module: nn.Module,
    given: Call,
    end: str,
    seen: Hanging,
    norms: Sequence[str],
    tp: int,
) -> tuple[Change, ...] | None:
    """The fewest attributes to change with which each rank computes its columns; None if none do.

    Args:
        end, seen, norms: as they were found.
    """
    cuts = {**seen.cuts, **unseen_cuts(seen)}
    ranks = []
    for rank in range(tp):
        part = _part_of(module, cuts, seen, rank, tp)
        if part is None:
            return None
        ranks.append(part)
    open_ = list(_candidates(module, seen, tp))
    own = [ways for ways in open_ if "." not in ways[0].name]
    tries = itertools.chain(_subsets(own), _subsets(open_))
    for chosen in itertools.islice(tries, _TRIED):
        if all(
            _computes(part, given, end, seen, norms, chosen, rank, tp)
            for rank, part in enumerate(ranks)
        ):
            return chosen
    return None


def unseen_cuts(seen: Hanging) -> dict[str, Cut]:
    """The buffers that nothing hung on, cut as what has a number for each head is."""
    heads = heads_of(seen)
    found = {}
    for name, tensor in seen.unseen.items():
        at = [dim for dim, size in enumerate(tensor.shape) if size == heads > 1]
        if at:
            found[name] = Cut(at[0], (Part(heads, 1),))
    return found


def _subsets(open_: list[list[Change]]) -> Iterator[tuple[Change, ...]]:
    """Fewer changes first."""
    for many in range(len(open_) + 1):
        for some in itertools.combinations(open_, many):
            yield from itertools.product(*some)


def _candidates(module: nn.Module, seen: Hanging, tp: int) -> Iterator[list[Change]]:
    """For each attribute that may count what is cut: the ways in which a rank may have less."""
    heads = heads_of(seen)
    parts = [by_heads(part, heads) for cut in seen.cuts.values() for part in cut.parts]
    groups = {p.units: p.units * p.width for p in parts if 1 <= p.units < heads}
    counted = {p.units for p in parts} | {p.units * p.width for p in parts} | {seen.width}
    counted |= {sum(p.units * p.width for p in cut.parts) for cut in seen.cuts.values()}
    for path, inner in module.named_modules():
        if type(inner).__module__.startswith("torch.") or isinstance(inner, _ConvNd):
            continue
        for name, value in named_in_code(inner).items():
            if value in groups or (value > 1 and value in counted):
                ways = list(_ways(path, inner, name, value, seen, groups, tp))
                if ways:
                    yield ways


def _ways(
    path: str,
    module: nn.Module,
    name: str,
    value: int,
    seen: Hanging,
    groups: Mapping[int, int],
    tp: int,
) -> Iterator[Change]:
    told = str(value) if "." in name or name in _OWN else name
    known = {n: v for n, v in integers(vars(module)).items() if n not in _OWN}
    for cut in seen.cuts.values():
        text = _mixed(cut, value, told, known, groups)
        if text is not None:
            yield Change(path, name, *_valued(text, known, tp))
            return
    if value in groups:
        if value > 1:
            yield Change(path, name, *_valued(f"({told} + tp - 1) // tp", known, tp))
        return
    parts = [part for cut in seen.cuts.values() for part in cut.parts if part.units not in groups]
    group = next((n for n, wide in groups.items() if wide == value and n > 1), None)
    # where it may be either, numbers tell; where these agree, it is what no ranks share
    even = group is None or any(value in (p.units, p.units * p.width) for p in parts)
    if even and value % tp == 0:
        yield Change(path, name, *_valued(f"{told} // tp", known, tp))
    if group is not None:
        count = next((n for n, v in known.items() if v == group), str(group))
        text = f"({count} + tp - 1) // tp * ({told} // {count})"
        yield Change(path, name, *_valued(text, known, tp))


def _mixed(
    cut: Cut, value: int, told: str, known: Mapping[str, int], groups: Mapping[int, int]
) -> str | None:
    """What a rank has of the width of parts of which some are of groups, perhaps of one."""
    shared = {part.units for part in cut.parts if part.units in groups}
    plain = sum(p.units * p.width for p in cut.parts if p.units not in groups)
    if len(shared) != 1 or not plain or value != sum(p.units * p.width for p in cut.parts):
        return None
    group = shared.pop()
    count = next((n for n, v in known.items() if v == group), str(group))
    width = next((n for n, v in known.items() if v == plain), str(plain))
    return f"{width} // tp + ({told} - {width}) // {count} * (({count} + tp - 1) // tp)"


def _valued(text: str, known: Mapping[str, int], tp: int) -> tuple[str, int]:
    return text, Expression(text).evaluate({**known, "tp": tp})


def _part_of(
    module: nn.Module, cuts: Mapping[str, Cut], seen: Hanging, rank: int, tp: int
) -> nn.Module | None:
    """A copy with a rank's share of everything; None where it has none."""
    part = copy.deepcopy(module)
    inputs = {f"{path}.weight": path for path in seen.inside}
    with torch.no_grad():
        for name, tensor in tensors_of(part).items():
            cut = cuts.get(name)
            if name in inputs:
                columns = seen.columns[inputs[name]].shape[-1]
                at = next(dim for dim, size in enumerate(tensor.shape) if size == columns)
                cut = Cut(at, (Part(columns, 1),))
            if cut is None:
                continue
            rows = rows_of(cut, rank, tp)
            if rows is None:
                return None
            held, _, leaf = name.rpartition(".")
            owner = part.get_submodule(held)
            own = tensor.detach().index_select(cut.dim, rows)
            table = owner._parameters if leaf in owner._parameters else owner._buffers
            kept: Any = nn.Parameter(own) if table is owner._parameters else own
            table[leaf] = kept
            if isinstance(owner, _ConvNd) and leaf == "weight":
                owner.groups = max(1, owner.groups * len(rows) // tensor.shape[0])
    return part


def rows_of(cut: Cut, rank: int, tp: int) -> torch.Tensor | None:
    """The indices that a rank has along the dimension of a cut."""
    found, start = [], 0
    for part in cut.parts:
        if part.units % tp == 0:
            many = part.units // tp
            first = rank * many
        elif tp % part.units == 0:
            many, first = 1, rank * part.units // tp
        else:
            return None
        begin = start + first * part.width
        found.append(torch.arange(begin, begin + many * part.width))
        start += part.units * part.width
    return torch.cat(found)


def _computes(
    part: nn.Module,
    given: Call,
    end: str,
    seen: Hanging,
    norms: Sequence[str],
    chosen: tuple[Change, ...],
    rank: int,
    tp: int,
) -> bool:
    """Whether a rank's share gives the last product its columns of what the whole gives it."""
    right: dict[str, bool] = {}

    def checks(path: str) -> Hook:
        def hook(_: nn.Module, args: Any, out: Any) -> Any:
            parts = seen.columns[path].unflatten(-1, (seen.rounds, -1))
            wanted = parts.chunk(tp, -1)[rank].flatten(-2)
            right[path] = args[0].shape == wanted.shape and bool(
                (args[0] - wanted).abs().max() <= _NEAR * wanted.abs().max()
            )
            if out is None:
                return None
            cut = seen.inside[path]
            rows = None if cut is None else rows_of(cut, rank, tp)
            whole = seen.sums[path]
            return whole if rows is None else whole.index_select(-1, rows)

        return hook

    undo = []
    hooks = {path: checks(path) for path in (*seen.inside, end)}
    try:
        for change in chosen:
            undo.append(assign(part.get_submodule(change.module), change.name, change.value))
        with torch.no_grad():
            run_until(part, given, hooks, end, norms)
    except Exception:  # of code that was told the wrong numbers
        return False
    finally:
        for back in reversed(undo):
            back()
    return len(right) == len(hooks) and all(right.values())
