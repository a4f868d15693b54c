"""Whether Triton runs here, and how its programs are cut."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

triton: Any = None
tl: Any = None
with contextlib.suppress(ImportError):  # a machine without a GPU needs none
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]  # noqa: F401

_INTERPRETER = threading.Lock()
# by kernel, device and arguments: what Triton compiled, and the constants as it is called with them
_COMPILED: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}
KEPT = 4096
"""The most of them, which lengths that never come again would exceed."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def jit(body: Callable[..., None]) -> Any:
    """``triton.jit``, or the function as it is where there is no Triton."""
    return body if triton is None else triton.jit(body)


def importable() -> bool:
    """Whether there is a Triton at all."""
    return triton is not None


def available() -> bool:
    """Whether Triton can run anything: on a GPU, or under its interpreter."""
    return triton is not None and (torch.cuda.is_available() or interpreted())


def chosen(implementation: str, device_type: str) -> bool:
    """Whether kernels run on such devices: "triton" asks for them, "auto" for them on GPUs."""
    by_itself = implementation == "auto" and device_type == "cuda" and available()
    return by_itself or implementation == "triton"


def interpreted() -> bool:
    """Whether Triton's interpreter was asked for, which also takes tensors on the CPU."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def fused(*tensors: Tensor | None) -> bool:
    """Whether a kernel can take these tensors; its reference does otherwise."""
    given = [t for t in tensors if t is not None]
    return triton is not None and all(
        t.dtype in FLOATS and t.numel() > 0 and (t.is_cuda or interpreted()) for t in given
    )


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """``kernel`` on a grid of programs, to be called with its arguments, a tensor first.

    It runs on that tensor's device: Triton itself launches on the current one, whose stream is
    not the tensor's where that is on another. The interpreter replaces Triton's language while it
    runs: one thread at a time.
    """
    cells = (*grid, 1, 1)[:3]

    def interpret(*args: Any, **constants: Any) -> None:
        with _INTERPRETER:
            kernel[cells](*args, **constants)

    def run(first: Tensor, *rest: Any, **constants: Any) -> None:
        device = first.get_device()
        if device == torch.cuda.current_device():
            start(kernel, cells, device, (first, *rest), constants)
            return
        with torch.cuda.device(device):
            start(kernel, cells, device, (first, *rest), constants)

    return interpret if interpreted() else run


def start(
    kernel: Any,
    grid: tuple[int, ...],
    device: int,
    args: tuple[Any, ...],
    constants: dict[str, Any],
) -> None:
    """Launch ``kernel`` on the current device: what was compiled for such arguments, as it is.

    Triton's own way to it, which binds and compares all arguments each time, costs the host about
    twice as much (``benchmarks/op_overhead.py``). It is taken the first time, and where an address
    is none that kernels are compiled for alike: of 16 bytes.

    Args:
        args: those before ``constants``, in order.
        constants: the rest by name, and Triton's options.
    """
    key, addresses = [id(kernel), device, tuple(constants), *constants.values()], 0
    for arg in args:
        if isinstance(arg, Tensor):
            addresses |= arg.data_ptr()
            key.append(arg.dtype)
        else:
            key.append(arg)
    if addresses % 16:
        kernel[grid](*args, **constants)
        return
    known = _COMPILED.get(alike := tuple(key))
    if known is not None:
        compiled, last = known
        compiled[grid](*args, *last)
        return
    compiled = kernel[grid](*args, **constants)
    if len(_COMPILED) >= KEPT:
        _COMPILED.clear()
    _COMPILED[alike] = compiled, [constants[name] for name in kernel.arg_names[len(args) :]]


def power(n: int) -> int:
    """The least power of two that is not less than ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def tile(h: int, elements: int) -> tuple[int, int]:
    """Rows and columns of a block of ``elements``, for a matrix of ``h`` columns.

    512 columns are a warp's 128-bit loads of any dtype, and leave little of most widths over.
    """
    columns = min(power(h), 512)
    return elements // columns, columns


def blocks(n: int, size: int) -> int:
    """How many blocks of ``size`` cover ``n``."""
    return -(-n // size)


def warps(block: int) -> int:
    """How many of them run a program on ``block`` elements, 16 to a thread."""
    return max(block // 512, 1)


def groups_of(rows: int, high: int, across: int, device: torch.device) -> int:
    """How many programs share out the rows, where each has sums over its own to write.

    Several wait for each processor, so that none is idle towards the end, but each goes down 32
    rows at least.

    Args:
        high: rows of a block; across: programs that share out the columns.
    """
    return min(blocks(rows, max(high, 32)), blocks(16 * processors(device), across))


def wide(x: Tensor) -> Tensor:
    """``x`` in what it is computed in: at least float32."""
    return x if x.dtype == torch.float64 else x.float()


def rows_of(x: Tensor) -> Tensor:
    """``x`` as a matrix with contiguous rows; a copy only where it has to be one."""
    matrix = x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def vector(parameter: Tensor | None) -> Tensor | None:
    """``parameter`` as kernels read it, without strides."""
    return None if parameter is None else parameter.contiguous()


@functools.cache
def processors(device: torch.device) -> int:
    """How many programs run side by side on ``device``."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def differentiably(
    reference: Callable[..., Tensor], inputs: tuple[Tensor | None, ...], grad: Tensor
) -> list[Tensor | None]:
    """Gradients that can be differentiated again: those of the reference.

    Args:
        inputs: of ``reference``; ``grad``: of its result.
    """
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    found = torch.autograd.grad(reference(*inputs), wanted, grad, create_graph=True)
    by_id = {id(t): g for t, g in zip(wanted, found, strict=True)}
    return [by_id.get(id(t)) for t in inputs]
