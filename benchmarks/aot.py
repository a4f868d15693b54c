"""Whether every Triton kernel compiles well for GPUs that are not here.

Each is compiled ahead of time as it would be launched (``aot_cases.py``), and the result is read:
registers, spills, and for each argument how wide its loads and stores are. Exits with 1 where a
kernel spills, needs more threads than there are, or does not move 128 bits at once although its
rows are aligned to 16 elements, ``NARROW`` apart.
"""

from __future__ import annotations

import argparse
import itertools
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

    target: str
    registers: int
    spilled: int
    """Bytes of a thread."""
    accesses: tuple[Access, ...]
    split: int = 0
    """Narrow accesses that only the assembly has."""


@dataclass(frozen=True)
class Narrow:
    """Accesses of less than 128 bits that are meant to be, and why."""

    kernel: str
    """A module, or one kernel of it."""
    arguments: str
    reason: str
    least: int = 8
    """The bits they have at least."""
    most: int = 1000
    """How many a kernel has at most, of each argument."""


NARROW = (
    Narrow("norm", "means rstds sums", "numbers of a row"),
    Narrow("cross_entropy", "target largest total chosen every", "numbers of a row"),
    Narrow("cross_entropy", "log_sum of_sum of_target of_every", "numbers of a row"),
    Narrow("cross_entropy._statistics_kernel", "x", "the target's logit", most=1),
    Narrow("embedding", "ids places bounds", "numbers of a row"),
    # a block's 512 columns, shared out among all threads
    Narrow("gelu", "bias dbs", "once a program, of all its rows", least=32, most=1),
    Narrow("norm.backward_columns", "weight dws dbs", "as in gelu", least=32, most=1),
    # 1024 columns, shared out among the threads that its 8 rows of places need
    Narrow("embedding._add_up_kernel", "dw", "once a row, of all its places", least=32, most=1),
)


def examine(job: Job, target: str) -> Finding:
    """Compile ``job``, and read what came of it."""
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, architecture, lanes = TARGETS[target]
    kernel = getattr(import_module(job.room), job.kernel)
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
    if backend == "cuda":
        return Finding(target, *_usage(made.asm["cubin"]), accesses)
    assembly = made.asm["amdgcn"]
    count = {name: int(n) for name, n in re.findall(r"\.(\w+): +(\d+)", assembly)}
    # those of scalars are spilled to vectors
    spilled = max(count["private_segment_fixed_size"], 4 * count["vgpr_spill_count"])
    spilled += 4 * count["sgpr_spill_count"]
    wide = re.findall(r"\b(?:global|buffer|flat)_(?:load|store)_(\w+)", assembly)
    narrow = sum(not width.startswith("dwordx4") for width in wide)
    split = max(0, narrow - sum(a.bits < 128 for a in accesses))
    registers = count["vgpr_count"] + count["agpr_count"]
    return Finding(target, registers, spilled, accesses, split)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of local memory."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
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
    threads = job.warps * TARGETS[found.target][2]
    if threads > THREADS:
        wrong.append(f"{threads} threads")
    if found.spilled:
        wrong.append(f"spills {found.spilled} bytes")
    if aligned and found.split:
        wrong.append(f"{found.split} accesses are split in the assembly")
    for argument, bits in _widths(job, found).items():
        narrow = [b for b in bits if b < 128]
        if aligned and narrow:
            wrong.append(f"{len(narrow)} accesses of {argument} are of {min(narrow)} bits")
    return wrong


def _of(kernel: str, job: Job) -> bool:
    return kernel in (job.module, f"{job.module}.{job.kernel}")


def _widths(job: Job, found: Finding) -> dict[str, list[int]]:
    """The bits of all accesses of each argument, less those that are meant to be narrow."""
    widths: dict[str, list[int]] = {}
    for access in found.accesses:
        widths.setdefault(access.argument, []).append(access.bits)
    for argument, bits in widths.items():
        narrow = [b for b in bits if b < 128]
        if any(
            _of(given.kernel, job)
            and argument in given.arguments.split()
            and min(narrow) >= given.least
            and len(narrow) <= given.most
            for given in NARROW
            if narrow
        ):
            widths[argument] = [b for b in bits if b >= 128]
    return widths


def _row(job: Job, cases: Sequence[Case], found: Finding) -> tuple[str, ...]:
    widths = ", ".join(str(w) for w in sorted({case.width for case in cases}))
    least = min(itertools.chain.from_iterable(_widths(job, found).values()), default=0)
    return (
        *(f"{job.module}.{job.kernel}", cases[0].variant, widths, cases[0].dtype, found.target),
        *(str(n) for n in (job.warps, found.registers, found.spilled, least)),
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
        for job, cases in jobs(group).items()
    ]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        found = list(pool.map(examine, *zip(*((j, t) for j, _, t in work), strict=True)))
    rows, wrong = [], []
    for (job, cases, _), finding in zip(work, found, strict=True):
        rows.append(_row(job, cases, finding))
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
