"""What each style asks of the module it sits on, and where it puts that module's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

SUPPORTED_OPTIONS: Mapping[str, frozenset[str]] = {
    "colwise": frozenset(),
    "rowwise": frozenset(),
    "vocab": frozenset({"output"}),
    "sequence_parallel": frozenset(),
    "replicate": frozenset(),
    "attention": frozenset({"heads", "kv_heads", "head_dim", "attributes"}),
}


@dataclass(frozen=True)
class Style:
    """A style: the placements of a module's own parameters, and what can be wrong with it.

    ``complain`` takes the module and tp and returns what stands in the way, or None.
    """

    placements: Mapping[str, Placement]
    complain: Callable[[nn.Module, int], str | None]

    def placement(self, parameter: str) -> Placement:
        """Where a parameter of the module goes."""
        return self.placements.get(parameter, Replicate())


def divisors(*numbers: int) -> str:
    """The values of tp up to 64 that divide every one of ``numbers``, for messages."""
    fit = [n for n in range(1, 65) if all(number % n == 0 for number in numbers)]
    return ", ".join(map(str, fit))


def _runs_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether ``module`` computes exactly what torch's ``kind`` does."""
    return isinstance(module, kind) and type(module).forward is kind.forward


def _linear(module: nn.Module) -> str | None:
    if "weight" not in module._parameters or module._parameters["weight"] is None:
        own = [name for name, _ in module.named_children()]
        inside = f"; its parts are {', '.join(own[:6])}" if own else ""
        return f"{type(module).__name__} has no weight of its own to shard{inside}"
    if not _runs_as(module, nn.Linear):
        return (
            f"{type(module).__name__} is not a torch.nn.Linear (weight "
            f"{tuple(module._parameters['weight'].shape)}): this style does not know its layout"
        )
    return None


def _colwise(module: nn.Module, tp: int) -> str | None:
    wrong = _linear(module)
    if wrong is None and (width := int(module.out_features)) % tp:  # type: ignore[arg-type]
        wrong = f"tp {tp} does not divide its {width} outputs; tp may be {divisors(width)}"
    return wrong


def _rowwise(module: nn.Module, tp: int) -> str | None:
    wrong = _linear(module)
    if wrong is None and (width := int(module.in_features)) % tp:  # type: ignore[arg-type]
        wrong = f"tp {tp} does not divide its {width} inputs; tp may be {divisors(width)}"
    return wrong


def _vocab(module: nn.Module, tp: int) -> str | None:
    if _runs_as(module, nn.Embedding):
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return "an Embedding with max_norm, scale_grad_by_freq or sparse cannot be sharded"
        rows = int(module.num_embeddings)  # type: ignore[arg-type]
    elif _runs_as(module, nn.Linear):
        rows = int(module.out_features)  # type: ignore[arg-type]
    else:
        return f"{type(module).__name__} is neither a torch.nn.Embedding nor a torch.nn.Linear"
    if rows <= (tp - 1) * -(-rows // tp):
        return f"its {rows} rows leave a rank of {tp} without any"
    return None


def _whole(module: nn.Module, tp: int) -> str | None:
    return None


_WHOLE = Style({}, _whole)

STYLES: Mapping[str, Style] = {
    "colwise": Style({"weight": Shard(0), "bias": Shard(0)}, _colwise),
    "rowwise": Style({"weight": Shard(1)}, _rowwise),
    "vocab": Style({"weight": Shard(0), "bias": Shard(0)}, _vocab),
    "sequence_parallel": _WHOLE,
    "replicate": _WHOLE,
    "attention": _WHOLE,
}
