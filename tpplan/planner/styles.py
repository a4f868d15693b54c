"""What each style asks of the module it sits on, and where it puts that module's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tpplan.layout import Rows

_PACKED = ("in_proj_weight", "in_proj_bias")
SUPPORTED_OPTIONS: Mapping[str, frozenset[str]] = {
    "colwise": frozenset({"packed", "transposed"}),
    "rowwise": frozenset({"transposed", "reduce", "output"}),
    "vocab": frozenset({"output"}),
    "sequence_parallel": frozenset(),
    "replicate": frozenset(),
    "attention": frozenset(
        {"heads", "kv_heads", "head_dim", "attributes", "head_inputs", "gather"}
    ),
}


@dataclass(frozen=True)
class Style:
    """What can be wrong with a style on a module.

    ``complain`` takes the module and tp and returns what stands in the way, or None.
    """

    complain: Callable[[nn.Module, int], str | None]


def divisors(*numbers: int) -> str:
    """The values of tp up to 64 that divide every one of ``numbers``, for messages."""
    fit = [n for n in range(1, 65) if all(number % n == 0 for number in numbers)]
    return ", ".join(map(str, fit))


def placement_in(
    style: str, leaf: str, module: nn.Module, transposed: bool, rows: Rows | None
) -> Placement:
    """Where the parameter ``leaf`` of a module goes.

    Args:
        transposed: whether the weight is stored (in, out).
        rows: of a column-parallel projection that is not simply cut evenly.
    """
    parameter = module._parameters[leaf]
    matrix = parameter is not None and parameter.dim() >= 2 and leaf == "weight"
    if style == "attention" and is_multihead(module):
        return Shard(0) if rows is None or leaf not in _PACKED else rows
    if style == "vocab":
        return Shard(0)
    if style == "rowwise":
        return Shard(0 if transposed else 1) if matrix else Replicate()
    if style != "colwise":
        return Replicate()
    dim = 1 if matrix and (transposed or isinstance(module, nn.Embedding)) else 0
    return Shard(dim) if rows is None else Rows(dim, rows.pieces)


def runs_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether ``module`` computes exactly what torch's ``kind`` does."""
    return isinstance(module, kind) and type(module).forward is kind.forward


def is_multihead(module: nn.Module) -> bool:
    """Whether ``module`` is torch's own attention, which computes its projections by itself."""
    return runs_as(module, nn.MultiheadAttention)


def _attention(module: nn.Module, tp: int) -> str | None:
    if not is_multihead(module):
        return None
    if module.bias_k is not None or module.add_zero_attn:
        return "nn.MultiheadAttention with add_bias_kv or add_zero_attn cannot be sharded"
    if (heads := int(module.num_heads)) % tp:  # type: ignore[arg-type]
        return f"tp {tp} does not divide its {heads} heads; tp may be {divisors(heads)}"
    return None


def _colwise(module: nn.Module, tp: int) -> str | None:
    if isinstance(module, nn.ModuleList):
        # one module for each head, of which a rank runs those of its own heads
        if len(module) % tp:
            return f"tp {tp} does not divide its {len(module)} modules"
        return _unlike(module)
    return _weighted(module, tp)


def _unlike(members: nn.ModuleList) -> str | None:
    """What keeps the ranks from summing the gradients of different members with each other."""
    held = [list(member.named_parameters(remove_duplicate=False)) for member in members]
    if len({tuple((name, p.shape, p.dtype) for name, p in each) for each in held}) > 1:
        return "its modules have different parameters, and each rank runs others of them"
    every = [m for member in members for _, m in member.named_modules(remove_duplicate=False)]
    inner = [id(m) for m in every if any(p is not None for p in m._parameters.values())]
    if len(set(inner)) < len(inner):
        return "a module is in it several times, and each rank runs others of its modules"
    return None


def _weighted(module: nn.Module, tp: int) -> str | None:
    weight = module._parameters.get("weight")
    if weight is None:
        own = [name for name, _ in module.named_children()]
        inside = f"; its parts are {', '.join(own[:6])}" if own else ""
        return f"{type(module).__name__} has no weight of its own to shard{inside}"
    return None


def _rowwise(module: nn.Module, tp: int) -> str | None:
    wrong = _weighted(module, tp)
    if wrong is None and module._parameters["weight"].dim() != 2:  # type: ignore[union-attr]
        return f"{type(module).__name__} does not multiply by a matrix"
    return wrong


def _vocab(module: nn.Module, tp: int) -> str | None:
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return "an Embedding with max_norm, scale_grad_by_freq or sparse cannot be sharded"
        rows = int(module.num_embeddings)  # type: ignore[arg-type]
    elif runs_as(module, nn.Linear):
        rows = int(module.out_features)  # type: ignore[arg-type]
    else:
        return f"{type(module).__name__} is neither a torch.nn.Embedding nor a torch.nn.Linear"
    if rows <= (tp - 1) * -(-rows // tp):
        return f"its {rows} rows leave a rank of {tp} without any"
    return None


def _whole(module: nn.Module, tp: int) -> str | None:
    return None


STYLES: Mapping[str, Style] = {
    "colwise": Style(_colwise),
    "rowwise": Style(_rowwise),
    "vocab": Style(_vocab),
    "sequence_parallel": Style(_whole),
    "replicate": Style(_whole),
    "attention": Style(_attention),
}
