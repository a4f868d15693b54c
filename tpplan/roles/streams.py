"""The modules around others that the stream passes through: containers, elements, boundaries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tpplan import compat
from tpplan.comm import split
from tpplan.comm.conjugates import join
from tpplan.comm.placements import is_cut
from tpplan.comm.sharded import Parted, Window
from tpplan.comm.stream import Parts
from tpplan.places import at, taken, tensors_in, with_at
from tpplan.roles import comparing
from tpplan.roles.later import require_none_added
from tpplan.roles.logits import Logits
from tpplan.roles.lowered import Lowered, is_own_code, looks
from tpplan.roles.members import hand_over_late, members_of, outermost, prepare
from tpplan.roles.narrow import narrowed
from tpplan.roles.sequence import replaced, require_graph, require_sequence


class Container(Lowered):
    """Runs rewritten modules inside its own forward, between which the stream is global.

    The outermost one, which the user called, answers with full tensors, unless it was given the
    stream in its global form; for logits see ``Logits.answer``.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        if state.stream.shared is not None:
            return self._tpplan_contain(*args, **kwargs)
        tracer = compat.tracer(state.stream.sequence_parallel)
        if tracer is not None:
            raise RuntimeError(
                f"{state.plan.path or 'the model'}: {tracer} records no collectives, so a model "
                "that is sharded cannot be traced; trace it before tpplan.parallelize"
            )
        short = state.stream.sequence_parallel and self._tpplan_is_short(args, kwargs)
        step = self._tpplan_unsplit if short else self._tpplan_contain
        return outermost(self, step, args, kwargs)

    def _tpplan_is_short(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the stream has fewer tokens than ranks (a step of decoding).

        Its rows would be padded to one for each rank, and sent twice as often.
        """
        stream = self._tpplan.stream
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return False
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        x = next((t for t in given if t.dim() > stream.dim), None)
        if x is None or x.size(stream.dim) >= stream.group.size:
            return False
        return not any(isinstance(t, DTensor) for t in given)

    def _tpplan_unsplit(self, *args: Any, **kwargs: Any) -> Any:
        """With the stream whole on each rank."""
        with self._tpplan.stream.unsplit():
            return self._tpplan_contain(*args, **kwargs)

    def _tpplan_contain(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        stream = state.stream
        if state.inside:
            return self._tpplan_around(*args, **kwargs)
        asked = kwargs.get("output_attentions")
        if asked or (asked is None and self._tpplan_tells_attentions()):
            raise ValueError(
                "output_attentions: each rank computes the attention weights of its own heads "
                "only; ask the unsharded model for them"
            )
        compiling = torch.compiler.is_compiling()
        compared = None if compiling else comparing.begin(self, args, kwargs)
        if not compiling:
            if stream.moved():
                for _, own in members_of(self):
                    own.drop()
        elif stream.sequence_parallel and torch.is_grad_enabled():
            require_none_added(self, stream.group)
        prepare(self, summed_only=True)
        if compared is None:
            out = self._tpplan_around(*args, **kwargs)
        else:
            out = comparing.run(self, self._tpplan_around, compared, args, kwargs)
        if not stream.sequence_parallel:
            out = out if compiling else _converted(out, self._logits)
        elif stream.hands_on or any(stream.is_sharded(x) for x in (*args, *kwargs.values())):
            out = _converted(out, self._logits)
        else:
            out = _converted(out, self._whole)
        if compared is not None and torch.is_grad_enabled():
            comparing.watch_loss(self, out)
        return out

    def _tpplan_tells_attentions(self) -> bool:
        """Whether it does so where a call says nothing; to ask for what is not there is slow."""
        has = "config" in self.__dict__ or hasattr(type(self), "config")
        config = getattr(self, "config", None) if has else None
        return bool(getattr(config, "output_attentions", False))

    def _tpplan_around(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, around the modules that it calls."""
        stream = self._tpplan.stream
        stream.depth += 1
        try:
            return super().forward(*args, **kwargs)
        finally:
            stream.depth -= 1

    def _logits(self, x: DTensor) -> torch.Tensor:
        if isinstance(x, Window):  # of logits
            return x.full_tensor()
        return x.answer(self.training) if isinstance(x, Logits) else x

    def _whole(self, x: DTensor) -> torch.Tensor:
        state = self._tpplan
        stream = state.stream
        if isinstance(x, Logits):
            return x.answer(self.training)
        if isinstance(x, Parted):
            return x
        if stream.is_sharded(x) and x.dim() > stream.dim + 1:
            return stream.whole(x, state.transition).contiguous()
        if not stream.whole_results and is_cut(x, x.dim() - 1):
            return x
        return x.full_tensor()


def _converted(value: Any, convert: Callable[[DTensor], torch.Tensor]) -> Any:
    """``value`` with every DTensor in its tuples, lists, mappings and dataclasses converted."""
    if isinstance(value, torch.Tensor):
        return convert(value) if isinstance(value, DTensor) else value
    if isinstance(value, dict):
        # in an order that all ranks have, whose own may be that of a set
        for key in sorted(value, key=str):
            item = value[key]
            new = _converted(item, convert)
            if new is not item:
                value[key] = new
        return value
    if isinstance(value, tuple | list):
        items = [_converted(item, convert) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            new = _converted(item, convert)
            if new is not item:
                setattr(value, field.name, new)
    return value


def _as_they_came(out: Any, came: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """What an element gives, with what was given whole in the place of the rows taken of it."""
    for place, x in tensors_in(out):
        for rows, given in came:
            if x is rows and place is not None:
                out = with_at(out, place, given)
    return out


class InStack(Lowered):
    """An element of the layer stack: takes its chunk of the stream, and gives the stream back.

    The stream stays global inside the model, also where a whole tensor began it; a user who calls
    an element with a whole tensor is answered with one.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        if state.stream.shared is not None:
            return self._tpplan_step(*args, **kwargs)
        return outermost(self, self._tpplan_step, args, kwargs)

    def _tpplan_step(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        stream = state.stream
        prepare(self, summed_only=False)
        hand_over_late(self)
        plan = state.plan.element
        assert plan is not None
        x = taken(plan.argument, args, kwargs)
        if not stream.sequence_parallel or x is None or state.length is not None:
            return self._tpplan_summing(*args, **kwargs)
        require_sequence(x, stream.dim + 2, state.plan.path)
        require_graph(state.plan.path)
        length = x.size(stream.dim)
        if isinstance(x, DTensor):
            local = stream.to_local(x)
        else:
            local = split(x, stream.dim, state.transition)
        stays = isinstance(x, DTensor) or state.inside or stream.hands_on
        args, kwargs = replaced(plan.argument, local, args, kwargs)
        came = [(local, x)] if plan.others else []
        for other in plan.others:
            given = y = taken(other, args, kwargs)
            if not isinstance(y, torch.Tensor) or y.dim() <= stream.dim:
                continue
            if y is x:
                y = local
            elif y.size(stream.dim) != length:
                continue  # one row for all of them
            elif isinstance(y, DTensor):
                y = stream.to_local(y)
            else:
                y = split(y, stream.dim, state.transition)
            args, kwargs = replaced(other, y, args, kwargs)
            came.append((y, given))
        start = stream.now()
        stream.length = length
        try:
            out = self._tpplan_summing(*args, **kwargs)
            if came:
                out = _as_they_came(out, came)
        finally:
            stream.length = None
            stream.remember(start, state.plan.path, length)

        def answer(y: torch.Tensor) -> torch.Tensor:
            if stays:
                return stream.to_global(y, length)
            # as unsharded elements give it, for who views it or sends it on
            return join(y, stream.dim, length, state.transition).contiguous()

        return with_at(out, plan.output, answer(at(out, plan.output)))

    def _tpplan_summing(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, with what its layers keep back for a common sum."""
        state = self._tpplan
        if state.stream.pieces is None or torch.compiler.is_compiling():
            return self._tpplan_adding(*args, **kwargs)
        outer = state.stream.running
        state.stream.running = state.plan.path, compat.saved_tensors_hooks()
        try:
            return self._tpplan_adding(*args, **kwargs)
        finally:
            state.stream.running = outer

    def _tpplan_adding(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        watched = state.watched
        if watched is None:
            watched = _watched(self)
            if not torch.compiler.is_compiling():  # its graph would not serve a second time
                state.watched = watched
        as_planned, tables = watched
        if not tables:
            return super().forward(*args, **kwargs)
        stream = state.stream
        outer = stream.parts
        # by hooks, or other code since, which are to see each output as it is
        seen = not as_planned or any(hooks and looks(hooks) for hooks in tables)
        stream.parts = parts = None if seen else Parts(torch.is_grad_enabled())
        try:
            out = super().forward(*args, **kwargs)
        finally:
            stream.parts = outer
        if parts is not None and parts.kept:
            layers = next(iter(parts.kept))
            raise RuntimeError(
                f"{layers[-1]} did not run in {state.plan.path or 'the model'}: the outputs of "
                f"{', '.join(layers)} are added and reduced together, as the model ran them when "
                "the plan was compiled; give them the option 'reduce: separate'"
            )
        return out


def _watched(element: Lowered) -> tuple[bool, tuple[Any, ...]]:
    """The hooks of the modules that give out what is reduced together in ``element``.

    And whether these are still where they were, and run the code that was seen to add them up.
    """
    found: list[nn.Module] = []
    as_planned = is_own_code(element)
    for name, inner in element.named_modules():
        if isinstance(inner, Lowered) and inner._tpplan.plan.together:
            parts = name.split(".")
            around = [element.get_submodule(".".join(parts[:n])) for n in range(1, len(parts) + 1)]
            own = ".".join(filter(None, (element._tpplan.plan.path, name)))
            as_planned = as_planned and own == inner._tpplan.plan.path
            as_planned = as_planned and all(map(is_own_code, around))
            found += around
    return as_planned, tuple(
        hooks
        for module in found
        for hooks in (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    )


class Entering(Lowered):
    """The outermost module that was given a tensor for column-parallel layers only."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        if state.stream.shared is not None:
            return self._tpplan_enter(*args, **kwargs)
        if state.plan.projection and state.alone:
            return super().forward(*args, **kwargs)
        return outermost(self, self._tpplan_enter, args, kwargs)

    def _tpplan_enter(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        given = args, kwargs
        state.entered = True
        length = state.length
        if state.stream.pieces is not None:
            prepare(self, summed_only=False)  # of which products are made when they enter
        for plan, entry in zip(state.plan.boundaries, state.entries, strict=True):
            x = taken(plan.arguments[0], *given)
            if x is None:
                continue  # cross-attention that is given no states reads them from its cache
            entered = entry.enter(x, state.stream, length)
            if plan.narrowed:
                entered = narrowed(entered, state.stream.group.size)
            for argument in plan.arguments:
                if taken(argument, *given) is not x:
                    raise RuntimeError(
                        f"{state.plan.path}: '{argument.name}' is another tensor than "
                        f"'{plan.arguments[0].name}'; when the plan was compiled they were one"
                    )
                args, kwargs = replaced(argument, entered, args, kwargs)
        return super().forward(*args, **kwargs)
