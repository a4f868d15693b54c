"""Parameters as code of other modules reads them: those of a vocabulary, and replicated ones.

A vocabulary's table is whole to it, or a head where it is used as one.

``F.linear(x, self.embed.weight)`` gives logits of each rank's range of the vocabulary, as a head of
its own would. Whatever else is computed from the table is computed from all of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from tpplan import compat
from tpplan.comm import Site, Transition
from tpplan.roles.entry import Entry
from tpplan.roles.logits import Origin
from tpplan.roles.lowered import Lowered

# questions that the sharded table answers by itself
_ASKING = frozenset(
    {
        *(torch.Tensor.dim, torch.Tensor.element_size, torch.Tensor.is_complex),
        *(torch.Tensor.is_floating_point, torch.Tensor.ndimension, torch.Tensor.numel),
        *(torch.Tensor.size, torch.Tensor.stride, torch.Tensor.__len__, torch.Tensor.__repr__),
    }
)
# what is done to the parameter, not computed from its numbers
_TO_IT = frozenset(
    {
        *(torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook),
        *(torch.Tensor.retain_grad, torch.Tensor.backward, torch.Tensor.__setitem__),
        *(torch.Tensor.__iadd__, torch.Tensor.__isub__, torch.Tensor.__imul__),
        *(torch.Tensor.__idiv__, torch.Tensor.__ipow__),
    }
)


class Lent(Lowered):
    """Holds parameters that other modules' code reads while the model runs; these are whole."""

    def __getattr__(self, name: str) -> Any:
        held = super().__getattr__(name)
        state = vars(self).get("_tpplan")
        if state is None or name not in state.own.names or not isinstance(held, torch.Tensor):
            return held
        elsewhere = isinstance(held, DTensor) and held.device_mesh != state.transition.group.mesh
        if elsewhere or state.alone or state.on_locals:
            # what the user reads, put there or not, and what the module itself runs with
            return held
        return self._lend(name, held)

    def _lend(self, name: str, held: torch.Tensor) -> torch.Tensor:
        """What others compute with: what the module itself does."""
        return self._locals()[self._tpplan.own.names.index(name)]


class Table(Lent):
    """Holds rows of a vocabulary."""

    def _lend(self, name: str, held: torch.Tensor) -> torch.Tensor:
        if not isinstance(held, DTensor):
            return held
        if torch.compiler.is_compiling():
            return held.full_tensor()
        read = compat.dtensor(compat.local_of(held), compat.spec_of(held), Read)
        read._tpplan_table, read._tpplan_held = self, held  # type: ignore[attr-defined]
        read._tpplan_name, read._is_param = name, True  # type: ignore[attr-defined]
        return read


def _of_held(name: str) -> Any:
    return property(
        lambda read: getattr(read._tpplan_held, name),
        lambda read, value: setattr(read._tpplan_held, name, value),
    )


class Read(DTensor):
    """A sharded table in the hands of code that was written for a whole one.

    What is computed from it is computed from the whole table; what is done to it (hooks, writes) is
    done to the parameter, a DTensor.
    """

    _tpplan_table: Table
    _tpplan_held: DTensor
    _tpplan_name: str
    data, grad, requires_grad = map(_of_held, ("data", "grad", "requires_grad"))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            logits = _head(*args, **kwargs)
            if logits is not None:
                return logits
        name = getattr(func, "__name__", "")
        if func in _TO_IT or name == "__set__" or (name.endswith("_") and name[:2] != "__"):
            args, kwargs = tree_map(_held, (args, kwargs))
            return func(*args, **kwargs)
        if func in _ASKING or name == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                answer = func(*args, **kwargs)
            if not isinstance(answer, torch.Tensor):
                return answer
        args, kwargs = tree_map(_whole, (args, kwargs))
        return func(*args, **kwargs)


def _held(x: Any) -> Any:
    return x._tpplan_held if isinstance(x, Read) else x


def _whole(x: Any) -> Any:
    return x._tpplan_held.full_tensor() if isinstance(x, Read) else x


def _head(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The logits of ``F.linear`` where that is what a head computes; None where it is not."""
    if not isinstance(weight, Read) or bias is not None or weight.dim() != 2:
        return None
    table = weight._tpplan_table
    state = table._tpplan
    stream = state.stream
    if isinstance(input, DTensor) and not stream.is_sharded(input):
        return None
    if stream.length is not None:
        return None  # in an element, whose plain tensors are a rank's rows
    rule = None if state.plan.rule is None else state.plan.rule.pattern.text

    def site(reason: str) -> Site:
        return Site(state.plan.path, reason, rule)

    group = state.transition.group
    into = Transition(group, site("input of the table, as a head"), site("its gradient"))
    out = Transition(group, site("logits, gathered"), site("gradient of the logits"))
    entered = Entry(into, site("input of the table, again"), 1, False, True).enter(
        input, stream, None
    )
    local = table._locals()[state.own.names.index(weight._tpplan_name)]
    logits = table._tpplan_project(entered, local)
    return Origin(stream, out, weight.size(0), state.plan.options.get("output")).wrap(logits)
