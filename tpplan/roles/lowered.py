"""What every rewritten module has in common: its class is swapped, its data stays on it.

The new class derives from the module's own, so every isinstance check that held still holds; it
keeps the name, so ``repr`` and the model's own look-ups by class name are unchanged. Nothing is
captured in closures: a deep copy computes with the copy's weights.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tpplan import compat
from tpplan.comm import Stream, Transition
from tpplan.comm.agreement import Schedule
from tpplan.comm.distribute import loaded
from tpplan.compiled import ModulePlan
from tpplan.roles.entry import Entry
from tpplan.roles.parameters import Marks, Own, is_installed
from tpplan.roles.projection import Projection, projection

# what every module has: hooks and the mode, which are no part of its code
_NOT_CODE = frozenset(vars(nn.Module()))


def passive(hook: Any) -> Any:
    """``hook``, marked as one that looks at no tensor: no reason to compute what it could see."""
    hook._tpplan_passive = True
    return hook


def looks(hooks: Any) -> bool:
    """Whether some of a module's table of ``hooks`` may look at tensors."""
    return any(
        not getattr(hook, "_tpplan_passive", False) and not compat.records_nothing(hook)
        for hook in hooks.values()
    )


def is_own_code(module: nn.Module) -> bool:
    """Whether the forward that runs is the one that the module had when it was rewritten."""
    kind = type(module)
    if "forward" in vars(module):
        return False
    code = getattr(kind, "_tpplan_code", None)
    return code is None or kind._tpplan_origin[1].forward is code  # type: ignore[attr-defined]


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """What the code of a module may compute with that is no tensor; whole numbers may be counts."""
    own = {name: value for name, value in vars(module).items() if name not in _NOT_CODE}
    return {name: v for name, v in own.items() if v is None or isinstance(v, float | bool | str)}


class Known(Protocol):
    """What a module knows on which roles are put, rewritten or with a kernel only."""

    @property
    def transposed(self) -> bool:
        """Whether its weight is stored (in, out)."""


class State:
    """What a rewritten module knows.

    Attributes:
        plan: what was decided for the module.
        stream: shared by all rewritten modules of the model.
        own: the module's own parameters.
        transition: the sites of the collectives its style issues.
        entries: its boundaries, each shared with the modules that enter with the same tensor.
        dispatch: the ways on which tokens are sent to its experts and back, if they are.
        partner: what its fused kernel needs to know of other modules, if anything.
        members: rewritten modules inside it, found when first needed.
        keeping: those inside it that keep what a loss may read, found when first needed.
        schedule: when the ranks compare what it is called with.
        within_own: whether it was called while the rank drew from its own random sequence.
        apart: whether the parameters inside it have been given a graph node each.
        on_locals: whether the module has local tensors in the places of its parameters now.
        watched: whether what is reduced together in it is as planned, and its hooks, found when
            first needed.
        numbers: those of the module that its role computes with as they were; None where it
            runs the module's code.
        structure: what was inside it when that was last looked at.
        entered: whether something has since its replaced forward began; graphs would be guarded
            by how often.
    """

    def __init__(
        self,
        plan: ModulePlan,
        stream: Stream,
        own: Own,
        transition: Transition,
        entries: tuple[Entry, ...] = (),
        partner: Any = None,
        dispatch: tuple[Transition, Transition] | None = None,
    ) -> None:
        self.plan = plan
        self.dispatch = dispatch
        self.stream = stream
        self.own = own
        self.transition = transition
        self.entries = entries
        self.partner = partner
        self.members: list[tuple[Lowered, Own]] | None = None
        self.keeping: list[Any] | None = None
        self.schedule = Schedule()
        self.within_own = False
        self.apart = False
        self.on_locals = False
        self.watched: tuple[bool, tuple[Any, ...]] | None = None
        self.numbers: dict[str, Any] | None = None
        self.structure: Any = None
        self.entered = False

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        stream, own, entries, partner = copy.deepcopy(
            (self.stream, self.own, self.entries, self.partner), memo
        )
        twin = State(self.plan, stream, own, self.transition, entries, partner, self.dispatch)
        twin.numbers = self.numbers
        memo[id(self)] = twin
        return twin

    @property
    def transposed(self) -> bool:
        """Whether the module's weight is stored (in, out)."""
        return self.plan.transposed

    @property
    def length(self) -> int | None:
        """The global sequence length where an element of the stack runs the module, else None."""
        length = self.stream.length
        if length is None:
            runs = self.stream.recalled(self.plan.path)
            length = next((run.length for run in runs if run.length is not None), None)
        return length

    @property
    def inside(self) -> bool:
        """Whether the model's own code calls the module, which gets the stream in global form."""
        return self.stream.nested or bool(self.stream.recalled(self.plan.path))

    @property
    def alone(self) -> bool:
        """Whether the user calls the module by itself, not through one that runs it."""
        return self.stream.shared is None and not self.stream.recalled(self.plan.path)


class Lowered(nn.Module):
    """Base of the classes that rewritten modules take on. Never instantiated itself."""

    _tpplan: State
    _tpplan_project: Projection

    # whether its product has its bias, if it has one
    _tpplan_adds_bias = True

    def _tpplan_is_watched(self) -> bool:
        """Whether hooks may see, or change, what the module is given."""
        if self._backward_hooks or self._backward_pre_hooks:
            return True
        return looks(self._forward_pre_hooks)

    def _locals(self) -> Sequence[torch.Tensor]:
        return self._tpplan.own.read(self)

    def _tpplan_widen(self, rows: torch.Tensor) -> torch.Tensor:
        """What a table gives for rows of its weight."""
        return rows

    @contextlib.contextmanager
    def _tpplan_whole(self) -> Iterator[None]:
        """Within it, the module has its whole parameters and computes as it did unsharded.

        For calls by the user, who gives each rank the same and wants the same of each.
        """
        own, planned = self._parameters, self._tpplan.own
        outer = {name: own[name] for name in planned.names}
        for index, (name, parameter) in enumerate(outer.items()):
            if isinstance(parameter, DTensor):
                own[name] = planned.whole(index, parameter)  # type: ignore[assignment]
        try:
            yield
        finally:
            own.update(outer)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # what a conversion leaves behind is installed anew, and the old local tensors let go
        own = self._tpplan.own
        installed = all(is_installed(self._parameters.get(name)) for name in own.names)
        marks = [(name, Marks(p)) for name, p in self._parameters.items() if p is not None]
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, mark in marks:
            mark.put(self._parameters[name])  # type: ignore[arg-type]
        if installed:
            own.adopt(self)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        # deep copies are made by it as well: of parameters that users have put there, too
        for parameter in self.parameters():
            if isinstance(parameter, DTensor):
                compat.as_parameter(parameter)
        # its class is found by what it was made of; a subclass that others made is theirs
        origin = vars(type(self)).get("_tpplan_origin")
        reduced: Any = super().__reduce_ex__(protocol)
        made, args, *rest = reduced
        return (made, args, *rest) if origin is None else (_blank, origin, *rest)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        # a checkpoint of the unsharded model loads as before: each rank takes its own shard
        own, assigned = self._tpplan.own, local_metadata.get("assign_to_params_buffers", False)
        installed = all(is_installed(self._parameters.get(name)) for name in own.names)
        for name in own.names:
            given, here = state_dict.get(prefix + name), self._parameters.get(name)
            if not isinstance(given, torch.Tensor) or isinstance(given, DTensor):
                continue
            if isinstance(here, DTensor) and given.shape == here.shape:
                state_dict[prefix + name] = loaded(given, here, assigned)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if installed:
            own.adopt(self)


class LocalParameters(Lowered):
    """Runs the module's own forward with local tensors standing in for its parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        names = state.own.names
        if not names:
            return super().forward(*args, **kwargs)
        for module, _ in state.own.together(self):
            held = module._parameters
            for name in names:
                if name not in held:
                    raise RuntimeError(
                        f"{state.own.title(names.index(name))}: a parametrization was put on it "
                        "after the model was parallelized, and the module's own code would meet "
                        "what that makes of the sharded parameter; put it on before"
                    )
        if state.stream.shared is None and state.alone:
            with self._tpplan_whole():
                return super().forward(*args, **kwargs)
        return self._tpplan_on_locals(*args, **kwargs)

    def _tpplan_on_locals(self, *args: Any, **kwargs: Any) -> Any:
        own, state = self._parameters, self._tpplan
        names, outside = state.own.names, state.on_locals
        outer = [own[name] for name in names]
        for name, local in zip(names, self._locals(), strict=True):
            own[name] = local  # type: ignore[assignment]
        state.on_locals = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            state.on_locals = outside
            for name, parameter in zip(names, outer, strict=True):
                own[name] = parameter


def _blank(*origin: Any) -> nn.Module:
    return object.__new__(_class(*origin))


def lower(
    module: nn.Module,
    roles: Sequence[type[nn.Module]],
    state: Known,
    inner: type[Lowered] | None = None,
) -> None:
    """Give ``module`` the classes ``roles`` (the outermost first) in front of its own.

    Args:
        state: what they know.
        inner: a role that takes the place of torch's class that the module's own derives from,
            so that what the module's own class adds to it goes on working.
    """
    module.__class__ = _class(tuple(roles), type(module), inner)
    object.__setattr__(module, "_tpplan", state)
    # the proof puts another there
    vars(module).setdefault("_tpplan_project", projection(state.transposed))


def _class(*origin: Any) -> type[nn.Module]:
    return _class_of(*origin, origin[1].forward)


@functools.cache
def _class_of(
    roles: tuple[type[nn.Module], ...],
    original: type[nn.Module],
    inner: type[Lowered] | None,
    code: Callable[..., Any],
) -> type[nn.Module]:
    body: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_tpplan_origin": (roles, original, inner),
        "_tpplan_code": code,
    }
    # a copy of the outermost role's forward that shows the original's signature: Trainer and
    # generate() read the names of a model's arguments from it
    outermost = next((role for role in roles if "forward" in vars(role)), None)
    if outermost is not None:
        forward = types.FunctionType(
            outermost.forward.__code__,
            outermost.forward.__globals__,
            outermost.forward.__name__,
            outermost.forward.__defaults__,
            outermost.forward.__closure__,
        )
        forward.__kwdefaults__ = outermost.forward.__kwdefaults__
        body["forward"] = functools.update_wrapper(forward, code)
    bases = (*roles, original) if inner is None else (*roles, original, inner)
    made: type[nn.Module] = type(original.__name__, bases, body)

    def new(cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        # a slice of a container is another of its class. A subclass that others made makes
        # its own, copies too
        if cls is not made:
            return object.__new__(cls)
        _require_no_region(roles, original, (args, kwargs))
        return original(*args, **kwargs)

    if issubclass(made, Lowered):  # whose copies are made otherwise (``__reduce_ex__``)
        new.__wrapped__ = original.__init__  # type: ignore[attr-defined]
        made.__new__ = staticmethod(new)  # type: ignore[assignment]
    return made


def _require_no_region(
    roles: Sequence[type[nn.Module]], original: type[nn.Module], given: Any
) -> None:
    """Refuse another module around what is ``given``, if it would not send what this one sends."""
    if all("_tpplan_contain" in vars(role) for role in roles):
        return  # a container: those in it send what is to be sent
    for module in tree_leaves(given):
        if isinstance(module, Lowered) and isinstance(module._tpplan, State):
            raise RuntimeError(
                f"{module._tpplan.plan.path}: another {original.__name__} was made around this "
                "module, which computes what the ranks' parts need of each other only inside of "
                "the one that it was sharded in; change (slice) that before tpplan.parallelize"
            )
