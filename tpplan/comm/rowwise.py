"""Which ops give, on a rank's rows of their tensors, that rank's rows of their result.

A table of ops, by what they are: those that torch tags as pointwise, those that act along some
dimensions and leave the others alone, views that keep the sharded dimension apart. What is not in
it needs whole tensors. Ops appear as autograd and the dispatcher have them (``aten``), so losses,
norms and their gradients come down to a few.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tpplan import compat

# beside what torch tags as pointwise; each is, in every tensor it is given
POINTWISE = frozenset(
    {
        "_to_copy", "alias", "clone", "contiguous", "copy_", "detach", "elu_backward",
        "empty_like", "fill", "fill_", "full_like", "hardsigmoid_backward", "hardswish",
        "hardswish_", "hardswish_backward", "hardtanh_backward", "leaky_relu_backward",
        "lift_fresh", "log_sigmoid_backward", "masked_fill_", "mish_backward", "ones_like",
        "softplus_backward", "zero_", "zeros_like",
    }
)  # fmt: skip
# they draw for each element by itself
DRAWING = frozenset(
    {
        "bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "geometric_",
        "log_normal_", "native_dropout", "normal_", "poisson", "rand_like", "randn_like", "random_",
        "uniform_",
    }
)  # fmt: skip
# what they do along their ``dim`` (or ``dims``), they do at each place of the others by itself
ALONG = frozenset(
    {
        "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "all",
        "amax", "amin", "any", "argmax", "argmin", "cummax", "cummin", "cumprod", "cumsum", "flip",
        "index_select", "kthvalue", "linalg_vector_norm", "logcumsumexp", "logsumexp", "max",
        "mean", "min", "prod", "select", "slice", "sort", "split", "split_with_sizes", "std", "sum",
        "topk", "unbind", "var",
    }
)  # fmt: skip
# whole tensors of a given size, made after the properties of another
FACTORIES = frozenset({"new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"})
SUMS = frozenset({"sum"})


@dataclass(frozen=True)
class Call:
    """An op and what it was given.

    Attributes:
        held: the sharded dimension of each sharded tensor, by its ``id``.
        length: of that dimension; start, count: the rows of it that this rank has.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    held: Mapping[int, int]
    length: int
    start: int
    count: int

    @property
    def name(self) -> str:
        """Of the op, without its overload."""
        return self.func._schema.name.removeprefix("aten::")  # type: ignore[no-any-return]

    def get(self, name: str) -> Any:
        """The argument of that name, or its default."""
        for i, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                if i < len(self.args):
                    return self.args[i]
                return self.kwargs.get(name, argument.default_value)
        return None

    def changed(self, /, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, some of them replaced."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for i, argument in enumerate(self.func._schema.arguments):
            if argument.name in changes:
                if i < len(args):
                    args[i] = changes[argument.name]
                else:
                    kwargs[argument.name] = changes[argument.name]
        return tuple(args), kwargs

    def rows(self, t: Any, at: int) -> Any:
        """This rank's rows of a tensor along ``at``; all of one that has but one, or none."""
        if id(t) in self.held:
            return compat.local_of(t)
        if not isinstance(t, torch.Tensor) or at < 0 or t.size(at) != self.length:
            return t
        return t.narrow(at, self.start, self.count)


@dataclass(frozen=True)
class Rowwise:
    """How an op runs on rows: its arguments, and the sharded dimension of its results.

    ``at``: by the number of dimensions of a result; None where results are whole. ``summed``: they
    are the ranks' parts of a sum. ``func``: runs in place of the op. ``like``: arguments of the
    op that result in the same, where values are needed to say what it results in.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    at: Callable[[int], int] | None
    summed: bool = False
    func: Any = None
    like: tuple[tuple[Any, ...], dict[str, Any]] | None = None


def rowwise(call: Call) -> Rowwise | None:
    """How ``call`` runs on the ranks' rows; None where it needs the whole tensors."""
    name, func = call.name, call.func
    if func.namespace != "aten" or "out" in call.kwargs or torch.Tag.inplace_view in func.tags:
        return None
    if not all("Tensor" in str(r.type) for r in func._schema.returns):
        return None
    rule = _RULES.get(name)
    if rule is not None:
        return rule(call)
    if torch.Tag.nondeterministic_seeded in func.tags and name not in DRAWING:
        return None
    if torch.Tag.pointwise in func.tags or name in POINTWISE or name in DRAWING:
        return _pointwise(call)
    return None


def _pointwise(call: Call) -> Rowwise | None:
    tensors = [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, torch.Tensor)]
    if any(isinstance(a, torch.Tensor) for given in call.args for a in _listed(given)):
        return None
    if call.get("device") not in (None, tensors[0].device):
        return None
    ndim = max(t.dim() for t in tensors)
    places = {call.held[id(t)] + ndim - t.dim() for t in tensors if id(t) in call.held}
    if len(places) != 1:
        return None
    (at,) = places
    for t in tensors:
        own = at - (ndim - t.dim())
        if own >= 0 and t.size(own) not in (1, call.length):
            return None
    args, kwargs = _each(call, lambda t: at - (ndim - t.dim()))
    return Rowwise(args, kwargs, lambda n: at if n == ndim else -1)


def _listed(given: Any) -> Sequence[Any]:
    return given if isinstance(given, list | tuple) else ()


def _each(call: Call, at: Callable[[torch.Tensor], int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def rows(t: Any) -> Any:
        return call.rows(t, at(t)) if isinstance(t, torch.Tensor) else t

    return tree_map(rows, call.args), tree_map(rows, dict(call.kwargs))


def _dims(given: Any, ndim: int) -> list[int] | None:
    """Dimensions counted from the front; None where all are meant."""
    if given is None or given == []:
        return None
    return [int(d) % max(ndim, 1) for d in (given if isinstance(given, list | tuple) else [given])]


def _along(call: Call) -> Rowwise | None:
    index = call.get("index") if call.name == "index_select" else None
    tensors = [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, torch.Tensor)]
    data = [t for t in tensors if t is not index]
    x = next((t for t in data if id(t) in call.held), None)
    if x is None or id(index) in call.held:
        return None
    at, ndim = call.held[id(x)], x.dim()
    if any(t.shape != x.shape or call.held.get(id(t), at) != at for t in data):
        return None
    dims = _dims(call.get("dims") if call.get("dim") is None else call.get("dim"), ndim)
    if call.name == "slice" and _is_all(call):
        dims = []
    summed = dims is None or at in dims
    if summed and call.name not in SUMS:
        return None
    args, kwargs = _each(call, lambda t: -1 if t is index else at)
    if summed:
        return Rowwise(args, kwargs, None, summed=True)
    before = sum(d < at for d in dims or ())
    return Rowwise(args, kwargs, lambda n: at if n == ndim else at - before)


def _is_all(call: Call) -> bool:
    """Whether a slice takes everything."""
    whole = call.args[0].size(call.get("dim"))
    end = call.get("end")
    return not call.get("start") and (end is None or end >= whole) and call.get("step") == 1


def _moved(call: Call) -> Rowwise | None:
    """Ops that reorder dimensions, or add one."""
    x = call.args[0]
    at, ndim = call.held[id(x)], x.dim()
    order: list[int | None] = list(range(ndim))
    if call.name == "transpose":
        a, b = call.get("dim0") % ndim, call.get("dim1") % ndim
        order[a], order[b] = order[b], order[a]
    elif call.name == "t":
        order.reverse()
    elif call.name == "permute":
        order = [d % ndim for d in call.get("dims")]
    elif call.name == "unsqueeze":
        order.insert(call.get("dim") % (ndim + 1), None)
    if at not in order:
        return None
    args, kwargs = _each(call, lambda t: at)
    return Rowwise(args, kwargs, lambda n: order.index(at))


def _squeezed(call: Call) -> Rowwise | None:
    x = call.args[0]
    at, given = call.held[id(x)], _dims(call.get("dim"), x.dim())
    gone = [d for d in range(x.dim()) if x.size(d) == 1 and (given is None or d in given)]
    if at in gone:
        return None
    # of one row that a rank has, no dimension may go
    args = (compat.local_of(x), gone)
    after = at - sum(d < at for d in gone)
    return Rowwise(args, {}, lambda n: after, func=torch.ops.aten.squeeze.dims)


def _viewed(call: Call) -> Rowwise | None:
    """A view in which the sharded dimension stays one, with as many elements before it."""
    x, size = call.args[0], call.get("size")
    if not isinstance(size, list | tuple) or x.numel() == 0:
        return None
    at, size = call.held[id(x)], list(size)
    if -1 in size:
        known = 1
        for n in size:
            known *= n if n != -1 else 1
        size[size.index(-1)] = x.numel() // known
    before, seen = 1, 1
    for n in x.shape[:at]:
        before *= n
    for i, n in enumerate(size):
        if seen == before and n == call.length:
            args, kwargs = call.changed(self=compat.local_of(x), size=_with(size, i, call.count))
            return Rowwise(args, kwargs, lambda _, i=i: i)  # type: ignore[misc]
        seen *= n
    return None


def _expanded(call: Call) -> Rowwise | None:
    x, size = call.args[0], list(call.get("size"))
    at = call.held[id(x)] + len(size) - x.dim()
    if size[at] not in (-1, call.length):
        return None
    args, kwargs = call.changed(self=compat.local_of(x), size=_with(size, at, call.count))
    return Rowwise(args, kwargs, lambda n: at)


def _with(size: Sequence[int], at: int, count: int) -> list[int]:
    return [*size[:at], count, *size[at + 1 :]]


def _undone(call: Call) -> Rowwise | None:
    """``slice_backward`` and ``select_backward``: of a dimension that is not the sharded one."""
    grad, size, dim = call.args[0], call.get("input_sizes"), call.get("dim")
    dim = dim % len(size)
    at = call.held[id(grad)]
    if call.name == "select_backward" and dim <= at:
        at += 1
    if dim == at:
        return None
    here = _with(size, at, call.count)
    args, kwargs = call.changed(grad_output=compat.local_of(grad), input_sizes=here)
    return Rowwise(args, kwargs, lambda n: at)


def _joined(call: Call) -> Rowwise | None:
    """``cat`` and ``stack`` along another dimension."""
    tensors, dim = call.args[0], call.get("dim")
    places = {call.held[id(t)] for t in tensors if id(t) in call.held}
    if len(places) != 1 or len({t.dim() for t in tensors}) != 1:
        return None
    (at,) = places
    stacked = call.name == "stack"
    dim = dim % (tensors[0].dim() + stacked)
    if (not stacked and dim == at) or any(t.size(at) != call.length for t in tensors):
        return None
    after = at + (stacked and dim <= at)
    args, kwargs = _each(call, lambda t: at)
    return Rowwise(args, kwargs, lambda n: after)


def _indexed(call: Call) -> Rowwise | None:
    """``x[i, j]`` and ``x[i, j] = y`` of the first dimensions, by tensors that are whole."""
    x, indices = call.args[0], call.get("indices")
    at = call.held.get(id(x))
    if at is None or any(i is None or id(i) in call.held for i in indices):
        return None
    # a mask takes as many dimensions as it has
    masks = (torch.bool, torch.uint8)
    indices = [j for i in indices for j in (i.nonzero().unbind(1) if i.dtype in masks else (i,))]
    if at < len(indices):
        return None
    here, like = compat.local_of(x), call.changed(indices=indices)
    values = call.get("values")
    if values is None:
        args, kwargs = call.changed(self=here, indices=indices)
        return Rowwise(args, kwargs, lambda n: n - x.dim() + at, like=like)
    own = at - x.dim() + values.dim()
    if call.held.get(id(values), own) != own:
        return None
    if own >= 0 and values.size(own) not in (1, call.length):
        return None
    args, kwargs = call.changed(self=here, indices=indices, values=call.rows(values, own))
    return Rowwise(args, kwargs, lambda n: at, like=like)


def _made(call: Call) -> Rowwise | None:
    """A new tensor after the properties of a sharded one: like it where it has its shape."""
    x, size = call.args[0], call.get("size")
    if call.name == "new_empty_strided" or tuple(size) != tuple(x.shape):
        args, kwargs = call.changed(self=compat.local_of(x))
        return Rowwise(args, kwargs, None)
    at = call.held[id(x)]
    args, kwargs = call.changed(self=compat.local_of(x), size=_with(size, at, call.count))
    return Rowwise(args, kwargs, lambda n: at)


def _normalized(call: Call) -> Rowwise | None:
    """A norm of the last dimensions."""
    x = call.args[0]
    at = call.held.get(id(x))
    if at is None or len(call.held) > 1 or at >= x.dim() - len(call.get("normalized_shape")):
        return None
    args, kwargs = _each(call, lambda t: at if t is x else -1)
    return Rowwise(args, kwargs, lambda n: at)


_RULES: dict[str, Callable[[Call], Rowwise | None]] = {
    **dict.fromkeys(ALONG, _along),
    **dict.fromkeys(("transpose", "t", "permute", "unsqueeze"), _moved),
    **dict.fromkeys(FACTORIES, _made),
    **dict.fromkeys(("view", "_unsafe_view"), _viewed),
    **dict.fromkeys(("slice_backward", "select_backward"), _undone),
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("index", "index_put", "index_put_", "_unsafe_index"), _indexed),
    "squeeze": _squeezed,
    "expand": _expanded,
    "native_layer_norm": _normalized,
}
