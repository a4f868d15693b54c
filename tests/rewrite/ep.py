"""Models whose experts ranks of ep share, and the unsharded one on the batches of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks import zoo
from tests.compare import Errors, gradient_errors
from tpplan.comm.placements import part_of


def batch(number: int, length: int = 9) -> torch.Tensor:
    """Token ids, as many others for each number."""
    generator = torch.Generator().manual_seed(30 + number)
    return torch.randint(3, zoo.VOCAB, (2, length + number), generator=generator)


def objective(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """A loss of which each row has its part."""
    out = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    return -out.gather(-1, ids.roll(-1, 1)[..., None]).mean()


def is_shared(parameter: nn.Parameter) -> bool:
    """Whether ranks of ep have parts of it."""
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return "ep" in (names or ())


def mean_of(reference: nn.Module, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The losses of the unsharded model; the mean of its gradients is added to what it has."""
    losses = []
    for ids in batches:
        loss = objective(reference, ids)
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    return losses


def average(model: nn.Module, group: dist.ProcessGroup) -> None:
    """What data parallelism does: not to experts, whose gradients are means already."""
    for parameter in model.parameters():
        if parameter.grad is not None and not is_shared(parameter):
            grad = parameter.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            dist.all_reduce(local, group=group)
            local.div_(group.size())


def errors_of(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor | None]) -> Errors:
    """Of gradients or parameters: each rank's part beside that of the whole."""
    mine = {}
    for name, t in ours.items():
        if t is None:
            mine[name] = None
        else:
            mine[name] = t.to_local() if isinstance(t, DTensor) else t
    whole = {
        name: part_of(t, held) if isinstance(held := ours[name], DTensor) else t
        for name, t in theirs.items()
    }
    return gradient_errors({name: t for name, t in whole.items() if t.numel()}, mine)


def gradients(model: nn.Module) -> dict[str, Any]:
    """By name."""
    return {name: p.grad for name, p in model.named_parameters()}
