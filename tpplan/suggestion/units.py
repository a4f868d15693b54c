"""The modules of a trace that compute with parameters of their own, and what kind each is."""

from __future__ import annotations

import enum
from collections.abc import Iterator

from torch import nn

from tpplan.observe.products import Products
from tpplan.observe.trace import Call, Op, Trace
from tpplan.planner.views import KEEPING, VIEWS
from tpplan.styles.attention import ATTENTION
from tpplan.suggestion.traced import stacked_experts

_PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "einsum", "matmul", "_grouped_mm"}
)
_TURNING = frozenset({"t", "transpose", "permute", "expand"})


class Kind(enum.Enum):
    """What a module with parameters does with what it is given."""

    PRODUCT = enum.auto()  # multiplies by its weight, and adds a bias
    TABLE = enum.auto()  # looks up rows
    SCALES = enum.auto()  # has a number for each column or head: a norm, most often
    EXPERTS = enum.auto()  # those of a mixture, stacked
    MULTIHEAD = enum.auto()  # torch's own attention
    OTHER = enum.auto()


class Units:
    """The innermost modules with parameters; ``kinds`` is by path, in the order of calls."""

    def __init__(self, model: nn.Module, trace: Trace) -> None:
        self.model, self.trace = model, trace
        self._experts, self._products = stacked_experts(model), Products(model)
        self.kinds: dict[str, Kind] = {}
        for call in trace.calls:
            if call.path not in self.kinds:
                kind = self._kind(call)
                if kind is not None:
                    self.kinds[call.path] = kind

    def around(self, op: Op, within: Call) -> str | None:
        """The outermost unit that an op is in, inside of a call; None where code does it."""
        found = None
        for call in self.trace.ancestors(op.call):
            if call.index == within.index:
                break
            found = call.path if call.path in self.kinds else found
        return found

    def calls(self, path: str) -> Iterator[Call]:
        """Those of a unit."""
        return (call for call in self.trace.calls if call.path == path)

    def _kind(self, call: Call) -> Kind | None:
        module = self.model.get_submodule(call.path)
        own = [p for p in module._parameters.values() if p is not None]
        if ATTENTION.is_region(module):
            return Kind.MULTIHEAD
        if not own:
            return None
        if call.path in self._experts:
            return Kind.EXPERTS
        if isinstance(module, nn.Embedding):
            return Kind.TABLE
        if any(True for _ in module.children()):
            # its code computes with them, beside what its children do
            return Kind.SCALES if self._normalises(call) else None
        if self._products.orientation(self.trace, call.path) is not None:
            return Kind.PRODUCT
        return Kind.OTHER if self._multiplies(call) else Kind.SCALES

    def _normalises(self, call: Call) -> bool:
        """Whether it has but numbers for columns, and lets children without any do the rest."""
        parameters = self.model.get_submodule(call.path).named_parameters()
        if any("." in name or p.dim() > 1 for name, p in parameters):
            return False
        ops = self.trace.ops[call.first_op : call.last_op]
        names = {op.name.removeprefix("aten.").split(".")[0] for op in ops}
        return names.isdisjoint(_PRODUCTS) and not any("_attention" in name for name in names)

    def _multiplies(self, call: Call) -> bool:
        """Whether it does more with its parameters than number by number."""
        own = {
            n for n, name in self.trace.parameters.items() if name.rpartition(".")[0] == call.path
        }
        for op in self.trace.ops[call.first_op : call.last_op]:
            name = op.name.removeprefix("aten.").split(".")[0]
            if not own.isdisjoint(op.inputs):
                if name in _PRODUCTS:
                    return True
                if name in VIEWS or name in KEEPING or name in _TURNING:
                    own.update(op.outputs)
        return False
