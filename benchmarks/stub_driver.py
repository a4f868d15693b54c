"""A GPU for Triton where there is none: it compiles for it, prepares launches, and leaves them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget

from tpplan.kernels import cross_entropy, embedding, gated, gelu, norm, transition

ROOMS = (cross_entropy, embedding, gated, gelu, norm, transition)
NOWHERE = torch.empty(0).get_device()
"""The index of a CPU's tensors, which stands for the current device's."""
Launch = tuple[tuple[int, ...], str, tuple[Any, ...]]
"""A grid, the hash of what was compiled, and the arguments, constants among them."""


class StubDriver:
    """What of Triton's driver a launch asks.

    Attributes:
        launches: those that were prepared, where they are ``kept``.
    """

    def __init__(self, kept: bool = False) -> None:
        self.kept, self.launches = kept, list[Launch]()
        self.utils, self.launcher_cls = self, self._launcher

    def _launcher(self, _src: Any, metadata: Any) -> Any:
        name = metadata.hash

        def launch(x: int, y: int, z: int, _stream: int, *rest: Any) -> None:
            if self.kept:
                self.launches.append(((x, y, z), name, rest[5:]))

        return launch

    def get_current_target(self) -> GPUTarget:
        """An H100."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The index of the one that there is."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """Its queue."""
        return 0

    def get_device_properties(self, _device: int) -> dict[str, int]:
        """Of the same."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, *_: Any) -> tuple[Any, ...]:
        """A module, a function, and its registers, spills and most threads."""
        return None, None, 32, 0, 1024


@contextlib.contextmanager
def stub_driver(kept: bool = False) -> Iterator[StubDriver]:
    """Kernels of ``tpplan`` are launched on it, with tensors that lie on the CPU.

    Triton keeps it until the process ends: where there is no GPU it has none to go back to.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("kernels made for Triton's interpreter are never compiled")
    stub = StubDriver(kept)
    triton.runtime.driver.set_active(stub)
    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(torch.cuda, "current_device", lambda: NOWHERE))
        for room in ROOMS:
            patches.enter_context(patch.object(room, "fused", lambda *_: True))
        yield stub
