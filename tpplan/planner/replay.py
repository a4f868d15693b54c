"""The proof of the sharded regions: each rank's run replayed against the whole model's.

Whether a layout, a head count and a per-rank attribute belong together cannot be read off shapes.
So the model's own code is run on real numbers, twice, without its large weights: every projection
answers with random numbers instead. Once as it is; then as each rank would run it, with the
columns of those same numbers that the rank holds and its own attributes. What then enters a
row-parallel layer must be, number for number, the rank's columns of what entered it in the whole
run: with that, and the weights cut alike, the sum over the ranks is the whole model's result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves, tree_map_only

from tpplan.compat import unfused
from tpplan.compiled import Element, ModulePlan, Summed
from tpplan.language import Rule
from tpplan.layout import Rows, own_part
from tpplan.observe.chance import same_randomness
from tpplan.observe.likeness import identity, shared_tensors
from tpplan.observe.untouched import by_itself, modules_as_before
from tpplan.places import at, taken, with_at
from tpplan.planner.events import (
    Departed,
    Event,
    Failure,
    compare,
    first_of,
    own_columns,
    own_numbers,
)
from tpplan.planner.handed import Parts
from tpplan.planner.known import Known
from tpplan.planner.match import folded
from tpplan.planner.rank_part import as_rank
from tpplan.planner.stand_in import stand_in
from tpplan.planner.stops import kind_of, place_of
from tpplan.roles.heads import heads_of, own_heads
from tpplan.roles.narrow import narrowed, whole_of
from tpplan.roles.sequence import replaced
from tpplan.styles import named

_LARGE = 2**22
_TOLERANCE = 1e-4


def prove(
    model: nn.Module,
    plans: Mapping[str, ModulePlan],
    layouts: Mapping[str, Rows],
    columns: set[str],
    bare: Mapping[str, tuple[Rule, Placement]],
    lists: set[str],
    tp: int,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    every: bool,
    known: Known,
    called: Collection[str],
    shown: Collection[str] = (),
    parts: Parts | None = None,
) -> Failure | None:
    """Replay ``call`` for ranks of ``tp``; the first departure, or None where there is none.

    Args:
        layouts: the rows of those column-parallel layers that are not simply cut evenly.
        columns: the column-parallel projections (others with that style run their own forward).
        bare: parameters that are cut by a rule of their own, and how.
        lists: those with a module for each head.
        every: whether it takes all ranks to make a sum, and not some as well as all.
        known: of the model, from proving it for other ranks.
        called: the modules that the trace came to; of others at most the weights are used.
        shown: modules of whose results code is shown a rank's share of the width, as a trial.
        parts: what watches what leaves the model.
    """
    replay = _Replay(model, plans, layouts, columns, bare, lists, tp, known, called)
    try:
        replay.narrow(shown)
        if parts is not None:
            parts.watch(replay.model, lambda: replay.rank)
        with torch.no_grad():
            replay.run(call, None)
    except Exception as error:
        return _stopped(replay, None, "cannot be run on random numbers", error)
    for rank in range(tp) if every else sorted({0, 1, tp // 2, tp - 1}):
        try:
            with torch.no_grad(), replay.own(rank):
                replay.run(call, rank)
        except Departed as found:
            return Failure(found.path, rank, found.message, place=place_of(found))
        except Exception as error:
            return _stopped(replay, rank, "fails", error)
    return None


def _stopped(replay: _Replay, rank: int | None, what: str, error: Exception) -> Failure:
    path = replay.running[-1] if replay.running else ""
    message = f"{what}: {type(error).__name__}: {error}"
    return Failure(path, rank, message, kind_of(error), place_of(error))


class _Replay:
    def __init__(
        self,
        model: nn.Module,
        plans: Mapping[str, ModulePlan],
        layouts: Mapping[str, Rows],
        columns: set[str],
        bare: Mapping[str, tuple[Rule, Placement]],
        lists: set[str],
        tp: int,
        known: Known,
        called: Collection[str],
    ) -> None:
        self.plans, self.layouts, self.columns, self.tp = plans, layouts, columns, tp
        self.bare, self.lists = bare, lists
        self.rank: int | None = None
        self.generator = torch.Generator().manual_seed(0)
        self.events, self.at = list[Event](), 0
        self.running: list[str] = []
        # modules on sharded columns or heads, which are run on the rank's part
        self.inner: list[str] = []
        self.answering = {p for p in plans if self._answers(model, p, called)}
        self.model = stand_in(model, self.answering, known)
        for path, module in self.model.named_modules():
            self._watch(path, module)
        self._last: dict[Hashable, Any] = {}
        self._fold(model)

    def _answers(self, model: nn.Module, path: str, called: Collection[str]) -> bool:
        """Whether a module answers with random numbers instead of computing."""
        plan, module = self.plans[path], model.get_submodule(path)
        style = named(plan.style)
        if path in self.columns or style.answers or style.stacked:
            return True
        size = sum(p.numel() for p in module._parameters.values() if p is not None)
        weight = module._parameters.get("weight")
        product = weight is not None and weight.dim() == 2 and not list(module.children())
        return product and size > _LARGE and path in called

    def _watch(self, path: str, module: nn.Module) -> None:
        plan = self.plans.get(path)
        if plan is not None:
            original = module.forward
            if named(plan.style).columns and path not in self.columns:
                module.forward = self._inner(path, original, plan)  # type: ignore[method-assign]
                self.inner += [] if plan.norm else [path]
            elif named(plan.style).stacked:
                module.forward = self._experts(path, plan)  # type: ignore[method-assign]
            elif plan.summed is not None:
                module.forward = self._summed(path, original, plan.summed)  # type: ignore[method-assign]
            elif plan.multihead:
                module.forward = self._multihead(path)  # type: ignore[method-assign]
            elif path in self.answering and module._parameters:
                module.forward = self._oracle(path, module, plan)  # type: ignore[method-assign]
            elif plan.head_inputs:
                module.forward = self._with_heads(plan, original)  # type: ignore[method-assign]
            if any(boundary.narrowed for boundary in plan.boundaries):
                module.forward = self._with_shares(plan, module.forward)  # type: ignore[method-assign]
        module.register_forward_pre_hook(lambda *_: self.running.append(path), prepend=True)
        module.register_forward_hook(lambda *_: self.running.__delitem__(-1))

    def _fold(self, model: nn.Module) -> None:
        """Run two of the elements of the stack that are alike, and the last; skip the others."""
        rules = {path: plan.rule for path, plan in self.plans.items() if plan.rule is not None}
        shared = shared_tensors(model)
        bare = {name: rule for name, (rule, _) in self.bare.items()}
        alike: dict[Hashable, list[str]] = {}
        for path, plan in self.plans.items():
            if plan.element is not None:
                layer = model.get_submodule(path)
                told = identity(layer, path, {**rules, **bare}, shared)
                alike.setdefault((folded(path), told), []).append(path)
        for key, paths in alike.items():
            if len({self.plans[path].ran for path in paths[1:]}) > 1:
                continue  # what they do hangs on more than what they are
            for place, path in enumerate(paths):
                module, element = self.model.get_submodule(path), self.plans[path].element
                assert element is not None
                skipped = 2 <= place < len(paths) - 1
                module.forward = self._folded(key, element, module.forward, skipped)  # type: ignore[method-assign]

    def _folded(
        self, key: Hashable, element: Element, original: Callable[..., Any], skipped: bool
    ) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            last: Any = self._last.get(key)
            if not skipped:
                self._last[key] = original(*args, **kwargs)
                return self._last[key]
            # what one like it gave beside the stream serves here as well
            return with_at(last, element.output, taken(element.argument, args, kwargs))

        return forward

    def narrow(self, shown: Collection[str]) -> None:
        """Show code that calls these modules a rank's share of the width of what they give."""
        for path in shown:
            self.model.get_submodule(path).register_forward_hook(
                lambda _, __, out: None if self.rank is None else narrowed(out, self.tp)
            )

    def own(self, rank: int) -> AbstractContextManager[None]:
        """With every attribute and bare parameter at the value it has on a rank."""
        bare = {name: placed for name, (_, placed) in self.bare.items()}
        inner = {path: self.layouts.get(path) for path in self.inner}
        return as_rank(self.model, self.plans, inner, bare, self.lists, (rank, self.tp))

    def run(self, call: tuple[tuple[Any, ...], dict[str, Any]], rank: int | None) -> None:
        self.rank, self.at, self.running = rank, 0, []
        args, kwargs = tree_map_only(torch.Tensor, own_numbers, call)
        with by_itself(), modules_as_before(self.model), unfused(), same_randomness(0):
            self.model(*args, **kwargs)
        if rank is not None and self.at < len(self.events):
            path = self.events[self.at].path
            raise Departed(path, "is not reached, which it is in the whole model")

    def _next(self, path: str) -> Event:
        if self.at >= len(self.events) or self.events[self.at].path != path:
            raise Departed(path, "is called in another order than in the whole model")
        self.at += 1
        return self.events[self.at - 1]

    def _oracle(self, path: str, module: nn.Module, plan: ModulePlan) -> Callable[..., Any]:
        weight = next(p for p in module._parameters.values() if p is not None and p.dim() >= 2)

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = whole_of(first_of(args, kwargs))
            if self.rank is None:
                turned = isinstance(module, nn.Embedding) or plan.transposed
                width = weight.shape[1 if turned else 0]
                leading = given.shape if isinstance(module, nn.Embedding) else given.shape[:-1]
                made = torch.randn(*leading, width, generator=self.generator)
                self.events.append(Event(path, given.clone(), made))
                return made.clone()
            event = self._next(path)
            style = named(plan.style)
            if style.sums:
                rows = self.layouts.get(path)
                due = own_columns(event.given, rows, self.rank, self.tp)
                compare(path, due, given, "its input is not this rank's columns")
                if plan.partial:
                    return self._share(event)
                if not style.scatters(plan.options):
                    return event.made.clone()
                return own_columns(event.made, None, self.rank, self.tp)
            compare(path, event.given, given, "its input is not the whole model's")
            if path not in self.columns:
                return event.made.clone()
            return own_columns(event.made, self.layouts.get(path), self.rank, self.tp)

        return forward

    def _experts(self, path: str, plan: ModulePlan) -> Callable[..., Any]:
        """Stacked experts, which were run by themselves: of random numbers a rank has a part."""

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            given = torch.cat([t.flatten().to(torch.float32) for t in tensors])
            if self.rank is None:
                made = torch.randn(tensors[0].shape, generator=self.generator)
                self.events.append(Event(path, given, made))
                return made.clone()
            event = self._next(path)
            compare(path, event.given, given, "its input is not the whole model's")
            whole = plan.summed is not None and plan.summed.outputs
            return event.made.clone() if whole else self._share(event)

        return forward

    def _share(self, event: Event) -> torch.Tensor:
        return event.share(self.rank == self.tp - 1, self.generator)

    def _summed(
        self, path: str, original: Callable[..., Any], summed: Summed
    ) -> Callable[..., Any]:
        """A module that gives a part of a sum: its parts, from all ranks, make the whole."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            module = self.model.get_submodule(path)
            own = {name: module._parameters[name] for name in summed.added}
            if self.rank is None:
                # what is inside of it comes after it, as on a rank
                self.events.append(event := Event(path, torch.empty(0), torch.empty(0)))
                made = original(*args, **kwargs)
                event.made = torch.cat([at(made, place).flatten() for place in summed.outputs])
                return made
            event = self._next(path)
            try:
                for name, whole in own.items() if self.rank else ():
                    module._parameters[name] = nn.Parameter(torch.zeros_like(whole), False)  # type: ignore[arg-type]
                made = original(*args, **kwargs)
            finally:
                module._parameters.update(own)
            event.parts.append(torch.cat([at(made, place).flatten() for place in summed.outputs]))
            if self.rank == self.tp - 1:
                what = "gives parts that do not sum up to what the whole model has there"
                compare(path, event.made, torch.stack(event.parts).sum(0), what)
            wholes = iter(event.made.split([at(made, p).numel() for p in summed.outputs]))
            for place, whole in zip(summed.outputs, wholes, strict=True):
                made = with_at(made, place, whole.view_as(at(made, place)))
            return made

        return forward

    def _multihead(self, path: str) -> Callable[..., Any]:
        """torch's own attention: whole in, whole out, by the rewriter's own code."""

        asked = inspect.signature(nn.MultiheadAttention.forward)

        def answer(given: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
            if self.rank is None:
                made = torch.randn(shape, generator=self.generator)
                self.events.append(Event(path, given.clone(), made))
            else:
                event = self._next(path)
                compare(path, event.given, given, "its input is not the whole model's")
                made = event.made
            return made.clone()

        def forward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
            module = self.model.get_submodule(path)
            call = asked.bind(module, *args, **kwargs)
            call.apply_defaults()
            query, key = call.arguments["query"], call.arguments["key"]
            out = answer(query, query.shape)
            if not call.arguments["need_weights"]:
                return out, None
            rows = 1 if query.dim() == 3 and module.batch_first else 0
            batch = (query.shape[1 - rows],) if query.dim() == 3 else ()
            return out, answer(key, (*batch, query.shape[rows], key.shape[rows])).softmax(-1)

        return forward

    def _inner(
        self, path: str, original: Callable[..., Any], plan: ModulePlan
    ) -> Callable[..., Any]:
        """A module that computes on sharded columns or heads: the rank's part of the whole's."""

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = first_of(args, kwargs)
            if self.rank is None:
                made: torch.Tensor = original(*args, **kwargs)
                self.events.append(Event(path, given.clone(), made))
                return made.clone()
            event = self._next(path)
            if event.given.shape != given.shape:
                due = self._part(path, event.given, given, "its input has")
                compare(path, due, given, "its input is not this rank's part")
            if plan.norm is not None:  # computed across the ranks, as its probe has shown
                return self._part(path, event.made, given, "gives")
            made = original(*args, **kwargs)
            due = self._part(path, event.made, made, "gives")
            compare(path, due, made, "does not give its part of what the whole model has there")
            return due

        return forward

    def _part(self, path: str, whole: torch.Tensor, own: torch.Tensor, what: str) -> torch.Tensor:
        """The rank's part of ``whole``, along the dimension in which its own is shorter."""
        assert self.rank is not None
        same = whole.dim() == own.dim()
        dims = [d for d in range(whole.dim()) if whole.size(d) != own.size(d)] if same else []
        if len(dims) != 1:
            raise Departed(path, f"{what} shape {tuple(own.shape)}")
        rows, (dim,) = self.layouts.get(path), dims
        placed = Shard(dim) if rows is None else Rows(dim, rows.pieces)
        return own_part(whole, placed, self.rank, self.tp)

    def _with_heads(self, plan: ModulePlan, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.rank is not None:
                cut = partial(heads_of, heads=plan.heads, rank=self.rank, tp=self.tp)
                args, kwargs = own_heads(plan, cut, args, kwargs)
            return original(*args, **kwargs)

        return forward

    def _with_shares(self, plan: ModulePlan, inner: Callable[..., Any]) -> Callable[..., Any]:
        """A module that is shown a rank's share of the width of what it is given."""
        arguments = [a for b in plan.boundaries if b.narrowed for a in b.arguments]

        def forward(*args: Any, **kwargs: Any) -> Any:
            for argument in arguments if self.rank is not None else ():
                given = taken(argument, args, kwargs)
                if given is not None:
                    share = narrowed(given, self.tp)
                    args, kwargs = replaced(argument, share, args, kwargs)
            return inner(*args, **kwargs)

        return forward
