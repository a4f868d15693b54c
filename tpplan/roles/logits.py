"""Logits that the model's own code takes for whole ones, while each rank holds its classes.

A loss computed from them runs where they are (``comm.cross_entropy``); what else is done to them
stays sharded where each class is on its own, and gathers them where not (``comm.sharded``).
"""

from __future__ import annotations

from types import EllipsisType, NoneType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.nn import _reduction
from torch.utils._pytree import tree_leaves, tree_map

from tpplan import compat
from tpplan.comm import Site, Stream, Transition, chunk, join
from tpplan.comm.cross_entropy import Vocabulary, cross_entropy
from tpplan.comm.placements import dim_of
from tpplan.comm.promised import LOW, Promised, promised
from tpplan.comm.sharded import Sharded, Window, computed, rows_of, whole_of
from tpplan.comm.source import Rooted, Source
from tpplan.comm.stream import chunk_of, is_awaited, version_of


class Origin(Source):
    """One call of a head, which all logits that come of it refer to.

    Attributes:
        stream: of the head's model.
        transition: of the head: what a gather is reported under.
        classes: the size of the vocabulary.
        output: the plan's option of that name.
        scored: whether a loss was computed from the logits while they were sharded.
    """

    __slots__ = ("classes", "head", "output", "scored", "stream")

    def __init__(self, stream: Stream, head: Transition, classes: int, output: object) -> None:
        super().__init__(head.group, head.forward, stream.randomness, Logits)
        self.specs = stream.source.specs
        self.stream, self.head = stream, head
        self.classes, self.output = classes, output
        self.scored = False

    @property
    def transition(self) -> Transition:
        """From rows to the whole tensor, and back."""
        return self.head

    def wrap(self, local: torch.Tensor) -> Logits:
        """The logits of all classes, of which ``local`` has this rank's last."""
        x = whole_of(local, self, self.classes, local.dim() - 1)
        # who gathers these very logits takes them from here and skips both conversions
        x._tpplan_chunk = (local, version_of(x))  # type: ignore[attr-defined]
        return x  # type: ignore[return-value]


def _vocabulary(source: Source, classes: int) -> Vocabulary:
    """How the classes are sharded."""
    site = source.site

    def of(reason: str) -> Site:
        return Site(site.module, f"cross entropy: {reason}", site.rule)

    return Vocabulary(
        classes,
        source.rows(classes)[0],
        source.group,
        of("largest logit of each token"),
        of("sum of the exponentials"),
        of("logit of the target"),
    )


# what casts a tensor, and what rearranges one
_CASTS = frozenset({torch.Tensor.float, torch.Tensor.to, torch.Tensor.type})
_MOVES = frozenset(
    {
        torch.Tensor.__getitem__, torch.Tensor.contiguous, torch.Tensor.flatten,
        torch.Tensor.permute, torch.Tensor.reshape, torch.Tensor.squeeze, torch.Tensor.transpose,
        torch.Tensor.unsqueeze, torch.Tensor.view, torch.flatten, torch.permute, torch.reshape,
        torch.squeeze, torch.transpose, torch.unsqueeze,
    }
)  # fmt: skip
# what a function was given that is the same later, or says how often it was changed
_STEADY = (int, slice, EllipsisType, NoneType, torch.memory_format, torch.Tensor)


class _Cast(NamedTuple):
    """What float32 logits are a copy of, and what was done to the copy since.

    A loss is in float32 anyway: of ``narrow`` it keeps, and its gradient moves, half the bytes.

    ``version``: of the copy then; ``passed``: the tensors that were read, with their versions;
    ``moves``: functions with what else they were given.
    """

    narrow: Logits
    version: int
    passed: tuple[tuple[torch.Tensor, int], ...]
    moves: tuple[tuple[Any, Any, Any], ...] = ()

    def __deepcopy__(self, memo: Any) -> None:
        """What is copied deeply may have been changed before."""


def _narrow(logits: Logits) -> Logits:
    """What ``logits`` are a copy of, moved likewise, where it makes no difference to a loss.

    It does where one was changed in place since, or somebody waits for the gradient of the copy.
    """
    cast = logits._tpplan_cast
    if cast is None:
        return logits
    passed = (*cast.passed, (logits, cast.version))
    if any(version_of(x) != was or is_awaited(x) for x, was in passed):
        return logits
    if cast.narrow.requires_grad is not logits.requires_grad:
        return logits
    found = cast.narrow
    for move, args, kwargs in cast.moves:
        found = move(found, *args, **kwargs)
    return found


def _followed(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """``out``, with what it is a copy of."""
    x = args[0] if args else None
    if out is x or not isinstance(out, Logits) or not isinstance(x, Logits):
        return out
    if torch.compiler.is_compiling() or compat.is_traced():
        return out
    if func in _CASTS and x.dtype in LOW and out.dtype == torch.float32:
        out._tpplan_cast = _Cast(x, version_of(out), ((x, version_of(x)),))
    elif func in _MOVES and (cast := x._tpplan_cast) is not None and cast.version == version_of(x):
        # a copy, as lists may be changed
        given = tree_map(lambda leaf: leaf, (args[1:], kwargs))
        leaves = tree_leaves(given)
        if all(isinstance(leaf, _STEADY) for leaf in leaves):
            read = [t for t in (x, *leaves) if isinstance(t, torch.Tensor)]
            passed = (*cast.passed, *((t, version_of(t)) for t in read))
            moves = (*cast.moves, (func, *given))
            out._tpplan_cast = _Cast(cast.narrow, version_of(out), passed, moves)
    return out


def _gathered(t: Any) -> Any:
    """What is computed of sharded parameters, whole: its gradient must be a DTensor as it is."""
    foreign = isinstance(t, DTensor) and not isinstance(t, Rooted | Window)
    return t.full_tensor() if foreign and t.requires_grad else t


class Logits(Sharded):
    """A DTensor sharded along its classes, for code that was written for whole logits.

    ``F.cross_entropy`` with class indices runs on the shards; all other functions run as on any
    ``Sharded``.
    """

    _tpplan_source: Source
    _tpplan_cast: _Cast | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_gathered, (args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.cross_entropy:
                loss = _loss(*args, **kwargs)
                if loss is not None:
                    return loss
            return _followed(func, args, kwargs, func(*args, **kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        later = promised(func, args, kwargs or {}, PromisedLogits)
        return computed(func, args, kwargs or {}) if later is None else later

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> DTensor:
        x = compat.unflattened(Logits, inner, context, size, stride)
        compat.unite(x.shape, compat.local_of(x).shape, dim_of(x))
        return x

    def whole(self) -> torch.Tensor:
        """The logits of all classes, on every rank; differentiable."""
        with torch._C.DisableTorchFunctionSubclass():
            kept, dim = chunk_of(self), dim_of(self)
            local = rows_of(self) if kept is None else kept
            return join(local, dim, self.size(dim), self._tpplan_source.transition)

    def answer(self, training: bool) -> torch.Tensor:
        """What the user gets: sharded or whole, as the plan says.

        Where it does not say, whole; but not in training when the model computed its loss from the
        shards: the gather would cost what that has saved.
        """
        origin = self._tpplan_source
        if not isinstance(origin, Origin):  # of a head that was compiled alone
            return self
        if origin.output == "shard" or (origin.output is None and training and origin.scored):
            return self
        return self.whole()


class PromisedLogits(Promised, Logits):
    """Those that are made when they are read."""

    kept = Logits


def _loss(
    input: Any,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """``F.cross_entropy`` on shards; None where that is not what it was given."""
    if not isinstance(input, Logits) or isinstance(target, Logits):
        return None
    dim = dim_of(input)
    if dim != min(1, input.dim() - 1) or target.dtype != torch.long:
        return None
    if target.shape != (*input.shape[:dim], *input.shape[dim + 1 :]):
        return None
    if not input.is_floating_point() or not 0.0 <= label_smoothing <= 1.0:
        return None
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    if weight is not None and not _usable(weight, input):
        return None
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    if reduction not in ("mean", "sum", "none"):
        return None
    if isinstance(target, DTensor):
        target = target.full_tensor()
    source, classes = input._tpplan_source, input.size(dim)
    if chunk(classes, source.group.size) * (source.group.size - 1) >= classes:
        return None  # the last rank has no class
    # what torch.compile put together does not know it
    origin = source if isinstance(source, Origin) else None
    logits = _narrow(input)
    kept = chunk_of(logits)
    local = rows_of(logits) if kept is None else kept
    rows = local.movedim(dim, -1).reshape(-1, local.size(dim))
    loss = cross_entropy(
        rows,
        target.reshape(-1),
        _vocabulary(source, classes),
        weight,
        ignore_index,
        reduction,
        label_smoothing,
        origin is not None and "cross_entropy" in origin.stream.fused,
        input.dtype,
    )
    if origin is not None:
        origin.scored = True
    return loss.reshape(target.shape) if reduction == "none" else loss


def _usable(weight: torch.Tensor, logits: Logits) -> bool:
    autocast = torch.is_autocast_enabled(logits.device.type)
    fits = weight.dtype == logits.dtype or (autocast and weight.is_floating_point())
    return fits and weight.shape == (logits.size(dim_of(logits)),) and not weight.requires_grad
