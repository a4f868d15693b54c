"""Whether every Triton kernel compiles well for GPUs that are not here.

Each is compiled ahead of time as it would be launched (``aot_cases.py``), and the result is read:
registers, spills, and for each argument how wide its loads and stores are. Exits with 1 where a
kernel spills, needs more threads than there are, or does not move 128 bits at once although its
rows are aligned to 16 elements, ``EXCEPTIONS`` apart.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.aot_cases import CASES, Case, Job, jobs
from benchmarks.common import table

# name: backend, architecture, lanes of a warp
TARGETS: dict[str, tuple[str, Any, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
THREADS = 1024
"""The most that a program may have, on every target."""
HEADS = ("kernel", "variant", "widths", "dtype", "target", "warps", "registers", "spilled", "bits")


@dataclass(frozen=True)
class Access:
    """A load or store of global memory, of one thread."""

    argument: str
    bits: int


@dataclass(frozen=True)
class Finding:
    """What became of a job on a target."""

    registers: int
    spilled: int
    """Bytes of local memory, or registers that were spilled."""
    threads: int
    accesses: tuple[Access, ...]
    split: int = 0
    """Narrow accesses that only the assembly has."""


@dataclass(frozen=True)
class Exception_:
    """Accesses narrower than 128 bits that are meant to be, and why."""

    kernel: str
    arguments: str
    reason: str
    least: int = 0
    """The bits they have at least."""
    most: int = 1000
    """How many there are at most, for each argument."""


EXCEPTIONS: tuple[Exception_, ...] = (
    Exception_("norm", "means rstds", "numbers of a row"),
    Exception_("cross_entropy", "target largest total chosen every", "numbers of a row"),
    Exception_("cross_entropy", "log_sum of_sum of_target of_every", "numbers of a row"),
    Exception_("cross_entropy._statistics_kernel", "x", "the target's logit", most=1),
    Exception_("embedding", "ids places bounds", "numbers of a row"),
)


def examine(job: Job, target: str) -> Finding:
    """Compile ``job``, and read what came of it."""
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, architecture, lanes = TARGETS[target]
    kernel = getattr(import_module(f"tpplan.kernels.{job.module}"), job.kernel)
    constants, hints = {}, {}
    for place, argument in enumerate(job.arguments):
        if argument.kind == "constexpr":
            constants[(place,)] = argument.value
        if argument.divisible:
            hints[(place,)] = [["tt.divisibility", 16]]
            if backend == "hip" and argument.kind.startswith("*"):
                # of a tensor of less than 2 GB
                hints[(place,)].append(["tt.pointer_range", 32])
    signature = {a.name: a.kind for a in job.arguments}
    made = compiled(
        ASTSource(kernel, signature, constants, hints),
        target=GPUTarget(backend, architecture, lanes),
        options={"num_warps": job.warps},
    )
    names = [a.name for a in job.arguments if a.kind != "constexpr"]
    accesses = tuple(traced(made.asm["llir"], names))
    threads = job.warps * lanes
    if backend == "cuda":
        return Finding(*_usage(made.asm["cubin"]), threads, accesses)
    assembly = made.asm["amdgcn"]
    count = {name: int(n) for name, n in re.findall(r"\.(\w+): +(\d+)", assembly)}
    spilled = (
        count["vgpr_spill_count"] + count["sgpr_spill_count"] + count["private_segment_fixed_size"]
    )
    wide = re.findall(r"\b(?:global|buffer|flat)_(?:load|store)_(\w+)", assembly)
    narrow = sum(not width.startswith("dwordx4") for width in wide)
    split = max(0, narrow - sum(a.bits < 128 for a in accesses))
    return Finding(count["vgpr_count"] + count["agpr_count"], spilled, threads, accesses, split)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of local memory."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (registers,), (stack,), (local,) = (
        re.findall(rf"\b{name}:(\d+)", text) for name in ("REG", "STACK", "LOCAL")
    )
    return int(registers), int(stack) + int(local)


_BITS = {"bfloat": 16, "half": 16, "bf": 16, "float": 32, "double": 64}
_POINTER = re.compile(r"ptr addrspace\([18]\) (%[\w.]+)")
_ACCESS = re.compile(
    r"(?:ld|st)\.global[\w.:]*?(?:\.v(?P<n>\d))?\.b(?P<b>\d+) "  # assembly, of NVIDIA
    r"|\.ptr\.buffer\.(?:load|store)\.(?:v(?P<bn>\d+))?(?P<bt>[a-z]+)(?P<bb>\d+)\("
    r"|\b(?:load|store) (?:<(?P<ln>\d+) x )?(?P<lt>[a-z]+)(?P<lb>\d*)>?[ ,].*ptr addrspace\(1\)"
    r"|\.masked\.(?:load|store)\.v(?P<mn>\d+)(?P<mt>[a-z]+)(?P<mb>\d+)\."
)


def traced(code: str, names: Sequence[str]) -> Iterator[Access]:
    """The loads and stores of LLVM's code, each with the kernel's argument that it is of.

    A pointer is followed to where it comes from; one that comes from nowhere is of ``?``.
    """
    made: dict[str, str] = {}
    lines = [line.strip() for line in code.splitlines() if not line.startswith("declare")]
    for line in lines:
        name, equals, value = line.partition(" = ")
        if equals and name.startswith("%"):
            made[name] = value
    for line in lines:
        found = _ACCESS.search(line)
        pointer = _POINTER.findall(line)
        if found and pointer:
            yield Access("/".join(sorted(_roots(pointer[-1], made, names))), _bits(found))


def _bits(found: re.Match[str]) -> int:
    n, kind, size = next(
        (found[a], found[b] if b else "i", found[c])
        for a, b, c in (("n", "", "b"), ("bn", "bt", "bb"), ("ln", "lt", "lb"), ("mn", "mt", "mb"))
        if found[c] or (b and found[b])
    )
    return int(n or 1) * (int(size) if size else _BITS[kind])


def _roots(pointer: str, made: Mapping[str, str], names: Sequence[str]) -> set[str]:
    """The arguments that a pointer may be of; arguments have numbers for names."""
    roots, seen, left = set[str](), set[str](), [pointer]
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        value = made.get(name)
        if value is None:
            place = name[1:]
            roots.add(names[int(place)] if place.isdigit() and int(place) < len(names) else "?")
        elif value.startswith("phi"):
            left += re.findall(r"\[ (%[\w.]+),", value)
        else:
            left += _POINTER.findall(value) or [f"%?{name}"]
    return roots


def judge(job: Job, found: Finding, aligned: bool) -> list[str]:
    """What is wrong with a kernel.

    Args:
        aligned: whether its rows are, to 16 elements: only then are its accesses judged.
    """
    wrong = []
    if found.threads > THREADS:
        wrong.append(f"{found.threads} threads")
    if found.spilled:
        wrong.append(f"spills {found.spilled}")
    if not aligned:
        return wrong
    if found.split:
        wrong.append(f"{found.split} accesses are split in the assembly")
    for argument in sorted({a.argument for a in found.accesses}):
        narrow = [a.bits for a in found.accesses if a.argument == argument and a.bits < 128]
        if narrow and not any(_excused(job, argument, narrow, e) for e in EXCEPTIONS):
            wrong.append(f"{len(narrow)} accesses of {argument} are of {min(narrow)} bits")
    return wrong


def _excused(job: Job, argument: str, narrow: Sequence[int], given: Exception_) -> bool:
    return (
        given.kernel in (job.module, f"{job.module}.{job.kernel}")
        and argument in given.arguments.split()
        and min(narrow) >= given.least
        and len(narrow) <= given.most
    )


def _row(job: Job, cases: Sequence[Case], target: str, found: Finding) -> tuple[str, ...]:
    widths = ", ".join(str(w) for w in sorted({case.width for case in cases}))
    # of the arguments that no exception is for: the narrowest
    excused = {n for e in EXCEPTIONS if e.kernel == job.module for n in e.arguments.split()}
    bits = [a.bits for a in found.accesses if a.argument not in excused]
    return (
        *(f"{job.module}.{job.kernel}", cases[0].variant, widths, cases[0].dtype, target),
        *(str(job.warps), str(found.registers), str(found.spilled), str(min(bits, default=0))),
    )


def _names(given: str, known: Mapping[str, object]) -> list[str]:
    names = given.split(",") if given else list(known)
    for name in names:
        if name not in known:
            raise SystemExit(f"no {name!r}: known are {', '.join(known)}")
    return names


def main() -> int:
    """Compile, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", default="", help=f"of {', '.join(TARGETS)}, with commas")
    parser.add_argument("--kernels", default="", help=f"of {', '.join(CASES)}, with commas")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    # kernels for the interpreter cannot be compiled; nothing has imported them yet
    os.environ.pop("TRITON_INTERPRET", None)
    import triton

    begun = time.perf_counter()
    targets, groups = _names(options.targets, TARGETS), _names(options.kernels, CASES)
    work = [
        (job, cases, target)
        for target in targets
        for group in groups
        for job, cases in jobs(group, TARGETS[target][2]).items()
    ]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        found = list(pool.map(examine, *zip(*((j, t) for j, _, t in work), strict=True)))
    rows, wrong = [], []
    for (job, cases, target), finding in zip(work, found, strict=True):
        rows.append(_row(job, cases, target, finding))
        reasons = judge(job, finding, all(case.width % 16 == 0 for case in cases))
        wrong += [f"failed: {' '.join(rows[-1][:5])}: {reason}" for reason in reasons]
    print(table(HEADS, rows))
    took = time.perf_counter() - begun
    print(
        f"\ntriton {triton.__version__}: {len(rows)} compiled in {took:.0f} s, {len(wrong)} wrong"
    )
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
