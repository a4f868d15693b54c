"""Logits that the model's own code takes for whole ones, while each rank holds its classes.

A loss computed from them runs where they are (``comm.cross_entropy``); whatever else is done to
them is done as on any DTensor, and gathers them where there is no other way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import _reduction
from torch.utils._pytree import tree_leaves, tree_map

from tpplan.comm import Site, Stream, Transition, chunk, join, split
from tpplan.comm.cross_entropy import Vocabulary, cross_entropy
from tpplan.comm.stream import chunk_of, version_of

_CHANGING = frozenset({"__setitem__", "__set__", "__delete__"})


class Origin:
    """One call of a head, which all logits that come of it refer to.

    Attributes:
        stream: of the head's model.
        transition: of the head: what a gather is reported under.
        classes: the size of the vocabulary.
        output: the plan's option of that name.
        scored: whether a loss was computed from the logits while they were sharded.
    """

    __slots__ = ("classes", "output", "scored", "stream", "transition")

    def __init__(
        self, stream: Stream, transition: Transition, classes: int, output: object
    ) -> None:
        self.stream, self.transition = stream, transition
        self.classes, self.output = classes, output
        self.scored = False

    def wrap(self, local: torch.Tensor) -> Logits:
        """The logits of all classes, of which ``local`` has this rank's last."""
        x = self.stream.to_global(local, self.classes, local.dim() - 1)
        # who gathers these very logits takes them from here and skips both conversions
        x._tpplan_chunk = (local, version_of(x))  # type: ignore[attr-defined]
        return self.mark(x)

    def mark(self, x: DTensor) -> Logits:
        """``x`` as logits of this origin."""
        x.__class__ = Logits
        x._tpplan_origin = self  # type: ignore[attr-defined]
        return x  # type: ignore[return-value]

    def vocabulary(self) -> Vocabulary:
        """How the classes are sharded."""
        group, site = self.stream.group, self.transition.forward

        def of(reason: str) -> Site:
            return Site(site.module, f"cross entropy: {reason}", site.rule)

        return Vocabulary(
            self.classes,
            min(chunk(self.classes, group.size) * group.rank, self.classes),
            group,
            of("largest logit of each token"),
            of("sum of the exponentials"),
            of("logit of the target"),
        )


class Logits(DTensor):
    """A DTensor sharded along its classes, for code that was written for whole logits.

    ``F.cross_entropy`` with class indices runs on the shards. Every other function runs as on a
    DTensor, plain tensors beside it being the same on all ranks, or else on the whole logits. What
    comes of it is ``Logits`` where it is still sharded along the classes, a plain whole tensor
    where it is not.
    """

    _tpplan_origin: Origin

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.cross_entropy:
                loss = _loss(*args, **kwargs)
                if loss is not None:
                    return loss
                return _on_whole(func, args, kwargs)
            x = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, Logits))
            if func is torch.Tensor.__setitem__ and args[0] is x:
                return _assign(*args)
            out = _computed(func, args, kwargs, x)
            return tree_map(lambda t: _answer(t, x._tpplan_origin), out)

    def whole(self) -> torch.Tensor:
        """The logits of all classes, on every rank; differentiable."""
        with torch._C.DisableTorchFunctionSubclass():
            origin, dim = self._tpplan_origin, _class_dim(self)
            kept = chunk_of(self)
            local = self.to_local() if kept is None else kept
            return join(local, dim, origin.classes, origin.transition)

    def answer(self, training: bool) -> torch.Tensor:
        """What the user gets: sharded or whole, as the plan says.

        Where it does not say, whole; but not in training when the model computed its loss from the
        shards: the gather would cost what that has saved.
        """
        origin = self._tpplan_origin
        if origin.output == "shard" or (origin.output is None and training and origin.scored):
            return self
        return self.whole()


def _class_dim(x: DTensor) -> int:
    placement = x.placements[0]
    assert isinstance(placement, Shard)
    return placement.dim


def _answer(value: Any, origin: Origin) -> Any:
    if not isinstance(value, DTensor):
        return value
    placement = value.placements[0]
    if value.device_mesh != origin.stream.mesh:
        return value
    if isinstance(placement, Shard) and value.size(placement.dim) == origin.classes:
        return origin.mark(value) if type(value) is DTensor else value
    return value.full_tensor()


def _computed(func: Any, args: Any, kwargs: Any, x: Logits) -> Any:
    mesh = x.device_mesh

    def beside(t: Any) -> Any:
        if isinstance(t, torch.Tensor) and not isinstance(t, DTensor):
            return DTensor.from_local(t, mesh, [Replicate()], run_check=False)
        return t

    try:
        return func(*tree_map(beside, args), **tree_map(beside, kwargs))
    except (torch.OutOfMemoryError, torch.distributed.DistError):
        raise
    except Exception:
        if _changes(func, kwargs):
            raise
    return _on_whole(func, args, kwargs)


def _changes(func: Any, kwargs: Any) -> bool:
    """Whether a function writes into its arguments, which it must not do to a copy of them."""
    name = getattr(func, "__name__", "")
    inplace = name.endswith("_") and not name.endswith("__")
    return inplace or name in _CHANGING or name.startswith("__i") or "out" in kwargs


def _on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    def whole(t: Any) -> Any:
        if isinstance(t, Logits):
            return t.whole()
        return t.full_tensor() if isinstance(t, DTensor) else t

    return func(*tree_map(whole, args), **tree_map(whole, kwargs))


def _assign(x: Logits, key: Any, value: Any) -> None:
    """``x[key] = value``, through the whole logits: any index may be one of classes."""
    origin, dim = x._tpplan_origin, _class_dim(x)
    whole = x.whole().clone()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    whole[key] = value
    mine = split(whole, dim, origin.transition)
    x.copy_(origin.stream.to_global(mine, origin.classes, dim))


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
    dim = _class_dim(input)
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
    origin = input._tpplan_origin
    kept = chunk_of(input)
    local = input.to_local() if kept is None else kept
    rows = local.movedim(dim, -1).reshape(-1, local.size(dim))
    loss = cross_entropy(
        rows,
        target.reshape(-1),
        origin.vocabulary(),
        weight,
        ignore_index,
        reduction,
        label_smoothing,
        "cross_entropy" in origin.stream.fused,
    )
    origin.scored = True
    return loss.reshape(target.shape) if reduction == "none" else loss


def _usable(weight: torch.Tensor, logits: Logits) -> bool:
    autocast = torch.is_autocast_enabled(logits.device.type)
    fits = weight.dtype == logits.dtype or (autocast and weight.is_floating_point())
    return fits and weight.shape == (logits._tpplan_origin.classes,) and not weight.requires_grad
