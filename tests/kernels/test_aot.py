"""The gate of ``benchmarks/aot.py`` passes what is well compiled, and finds what is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from benchmarks import aot
from benchmarks.aot_cases import Argument, Job, jobs

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    """A process whose kernels are not for the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            yield pool


@pytest.fixture(scope="module")
def backward() -> Job:
    """Of an RMSNorm of 4096 columns, in bfloat16."""
    return next(
        job
        for job, cases in jobs("norm").items()
        if job.kernel == "backward_whole" and cases[0].width == 4096 and cases[0].dtype == "bf16"
    )


def reasons(compiler: ProcessPoolExecutor, job: Job, target: str) -> list[str]:
    return aot.judge(job, compiler.submit(aot.examine, job, target).result(), aligned=True)


@pytest.mark.turns(32)
def test_the_command_passes(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "benchmarks.aot", "--targets", "sm_90"]
    done = subprocess.run(
        [*command, "--kernels", "transition", "--jobs", "1"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong" in done.stdout
    assert "transition._move_kernel" in done.stdout


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
class TestFindings:
    @pytest.mark.turns(12)
    def test_a_good_kernel(self, compiler: ProcessPoolExecutor, backward: Job, target: str) -> None:
        assert reasons(compiler, backward, target) == []

    @pytest.mark.turns(24)
    def test_a_spill(self, compiler: ProcessPoolExecutor, backward: Job, target: str) -> None:
        # five values of each of 128 columns, or of 256
        long = tuple(replace(a, value=8192) if a.name == "BLOCK" else a for a in backward.arguments)
        found = reasons(compiler, replace(backward, arguments=long, warps=1), target)
        assert [reason.split()[0] for reason in found] == ["spills"]

    def test_narrow_accesses(
        self, compiler: ProcessPoolExecutor, backward: Job, target: str
    ) -> None:
        unaligned = tuple(replace(a, divisible=a.kind.startswith("*")) for a in backward.arguments)
        found = reasons(compiler, replace(backward, arguments=unaligned), target)
        narrow = {reason.split()[3] for reason in found if "accesses of" in reason}
        # all that have strides, and none that is excused
        assert {"dy", "x", "dx", "dws"} <= narrow <= {"dy", "x", "weight", "dx", "dws"}

    def test_too_many_threads(
        self, compiler: ProcessPoolExecutor, backward: Job, target: str
    ) -> None:
        found = compiler.submit(aot.examine, backward, target).result()
        (reason,) = aot.judge(replace(backward, warps=64), found, aligned=True)
        assert reason.endswith("threads")


def test_of_a_tolerated_kind_no_more_is_tolerated() -> None:
    job = Job("cross_entropy", "", "_statistics_kernel", (Argument("x", "*bf16"),), 8)
    one = aot.Access("x", 16)
    assert aot.judge(job, aot.Finding("sm_90", 64, 0, (one,)), aligned=True) == []
    (reason,) = aot.judge(job, aot.Finding("sm_90", 64, 0, (one, one)), aligned=True)
    assert reason == "2 accesses of x are of 16 bits"
    assert aot.judge(job, aot.Finding("sm_90", 64, 8, (one,)), aligned=True) == ["spills 8 bytes"]


def test_a_pointer_is_followed_through_a_loop() -> None:
    code = """
  %3 = getelementptr i8, ptr addrspace(1) %1, i64 %9
  %4 = phi ptr addrspace(1) [ %3, %2 ], [ %5, %7 ]
  %5 = getelementptr i8, ptr addrspace(1) %4, i64 64
  %6 = load <4 x bfloat>, ptr addrspace(1) %4, align 8
  store float %8, ptr addrspace(1) %0, align 4
  %8 = tail call <4 x i32> @llvm.amdgcn.raw.ptr.buffer.load.v4i32(ptr addrspace(8) %10, i32 0)
  %10 = tail call ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p8.p1(ptr addrspace(1) %1, i16 0)
"""
    assert list(aot.traced(code, ["y", "x"])) == [
        aot.Access("x", 64),
        aot.Access("y", 32),
        aot.Access("x", 128),
    ]
