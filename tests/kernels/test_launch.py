"""What is launched without Triton's own way to it is what that would launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.kernels.bodies import New, bodies
from tpplan.kernels import launch, norm

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    """A process whose kernels are not for the interpreter."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "0")
        environment.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            yield pool


def off(skipped: int, kind: torch.dtype) -> New:
    """Makes tensors behind so many elements, which move them off their alignment."""

    def new(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        size = torch.Size(shape).numel()
        return torch.zeros(size + skipped, dtype=dtype or kind)[skipped:].view(shape)

    return new


def readable(launches: list[Any]) -> list[Any]:
    """Launches that can be compared: of tensors made anew, what they are."""
    return [
        (grid, name, [(a.dtype, a.shape) if isinstance(a, torch.Tensor) else a for a in args])
        for grid, name, args in launches
    ]


def launched(calls: list[Callable[[], Any]], stub: Any, straight: bool) -> list[Any]:
    """What the calls launch, by Triton's own way where ``straight``."""

    def start(kernel: Any, grid: Any, _: int, args: Any, constants: Any) -> None:
        kernel[grid](*args, **constants)

    stub.launches.clear()
    with patch.object(launch, "start", start if straight else launch.start):
        for call in calls:
            call()
    return readable(stub.launches)


SIZES = [(5, 48), (1, 16), (8, 4096)]


def compare(dtype: torch.dtype) -> tuple[int, list[int]]:
    """Every op at several sizes, all of them twice, on aligned tensors and then on others.

    Returns:
        How many kernels were launched, and for each size how many of the launches went Triton's
        own way.
    """
    # imported here, as it wants a process whose kernels are compiled
    from benchmarks.stub_driver import stub_driver

    kernels, slow = set[str](), list[int]()
    own = type(norm.backward_whole)
    with stub_driver(kept=True) as stub:
        for rows, h in SIZES * 2:
            for skipped in (0, 1):
                calls = bodies(off(skipped, dtype), rows, h)
                expected = launched(calls, stub, straight=True)
                with patch.object(own, "run", autospec=True, side_effect=own.run) as front:
                    assert launched(calls, stub, straight=False) == expected
                assert len(expected) == len(calls)
                kernels |= {name for _, name, _ in expected}
                slow.append(front.call_count)
    return len(kernels), slow


@pytest.mark.turns(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_as_triton_launches(dtype: torch.dtype, compiler: ProcessPoolExecutor) -> None:
    kernels, slow = compiler.submit(compare, dtype).result()
    each = len(bodies(off(0, dtype), 5, 48))
    assert kernels > 3 * each  # compiled for the alignment and the sizes, as well as by the op
    assert slow == [each, each] * len(SIZES) + [0, each] * len(SIZES)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[tuple[Any, ...]]()

    class Kernel:
        """Stands for a kernel, and for what becomes of it."""

        arg_names = ("x", "n", "BLOCK")

        def __getitem__(self, _: tuple[int, ...]) -> Callable[..., Any]:
            return lambda *args, **options: made.append((args, options)) or self

    monkeypatch.setattr(launch, "KEPT", 2)
    monkeypatch.setattr(launch, "_COMPILED", {})
    kernel, x = Kernel(), torch.empty(8)
    for n in (1, 2, 3, 3):
        launch.start(kernel, (1, 1, 1), -1, (x, n), {"BLOCK": 4, "num_warps": 1})
    assert len(launch._COMPILED) == 1
    assert [options for _, options in made] == [{"BLOCK": 4, "num_warps": 1}] * 3 + [{}]
    assert made[-1][0] == (x, 3, 4)
