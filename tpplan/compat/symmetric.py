"""Products fused with the collectives around them, over symmetric memory."""

from __future__ import annotations

import torch
import torch.distributed as dist


def fused_all_gather_matmul(
    x: torch.Tensor, matrices: list[torch.Tensor], dim: int, group_name: str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The whole of every rank's ``x`` along ``dim``, and its product with each matrix."""
    if not x.is_cuda:
        from torch.distributed._symmetric_memory import _fused_all_gather_matmul_fallback

        return _fused_all_gather_matmul_fallback(x, matrices, dim, group_name)  # type: ignore[return-value, arg-type]
    op = torch.ops.symm_mem.fused_all_gather_matmul
    return op(x, matrices, dim, group_name, return_A=True)  # type: ignore[no-any-return]


def fused_matmul_reduce_scatter(
    x: torch.Tensor, matrix: torch.Tensor, dim: int, group_name: str
) -> torch.Tensor:
    """This rank's rows along ``dim`` of the product, summed over the ranks."""
    if not x.is_cuda:
        from torch.distributed._symmetric_memory import _fused_matmul_reduce_scatter_fallback

        return _fused_matmul_reduce_scatter_fallback(x, matrix, "sum", dim, group_name)  # type: ignore[arg-type]
    op = torch.ops.symm_mem.fused_matmul_reduce_scatter
    return op(x, matrix, "sum", dim, group_name)  # type: ignore[no-any-return]


def enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    """So that inductor fuses what ``group`` sends; only NCCL's ranks have it.

    Without, its micro-pipeline pass leaves a graph as it is and says nothing (before torch 2.15,
    which looks for itself).
    """
    if dist.get_backend(group) == "nccl":
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(group.group_name)
