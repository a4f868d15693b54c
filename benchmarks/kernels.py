"""Fused kernels against the speed of a copy, PyTorch, torch.compile, Liger-Kernel and quack.

A kernel bound by memory can be no faster than a copy of as many bytes, measured in the same turns.
Before anything is timed, results and gradients are compared with float64.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import csv
import gc
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.common import finish, option_parser, parse, table
from benchmarks.timing import (
    Times,
    Work,
    device,
    environment,
    header,
    measure,
    on_one_stream,
    prepare,
    turn_of,
)

ELEMENTS = 1 << 28  # of each tensor of the sweep: (32768, 8192)
WIDTHS = tuple(1 << n for n in range(10, 17))
TOLERANCE = 2**-6
"""The largest error of a bfloat16 kernel, over the largest value."""
NOISE = 1.02
"""By how much the slower of two equal kernels may seem slower."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Op:
    """A kernel, the tensors it takes and what it has to move at least.

    Attributes:
        make: inputs of a shape; those of floating point have gradients where there is a backward.
        moved: bytes of a call by direction, of a shape.
        places: the shapes that are measured, by what they stand for.
        tiny: a shape for the interpreter.
        bars: by direction, shares of the copy ceiling up to a width, to be reached at ``at``.
    """

    name: str
    make: Callable[[Shape], list[Tensor]]
    moved: Callable[[Shape], Mapping[str, int]]
    places: Mapping[str, Sequence[Shape]]
    tiny: Shape
    bars: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    at: str = "TP-1"

    def bar(self, direction: str, place: str, shape: Shape) -> float | None:
        """The share of the copy ceiling to be reached, where there is one."""
        if place != self.at:
            return None
        fits = (share for width, share in self.bars.get(direction, ()) if shape[-1] <= width)
        return next(fits, None)


def _random(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, dtype=torch.bfloat16, device=device())


def _norm_inputs(adds: bool, shifts: bool) -> Callable[[Shape], list[Tensor]]:
    def make(shape: Shape) -> list[Tensor]:
        vectors = [_random(shape[-1]) for _ in range(1 + shifts)]
        return [_random(*shape) for _ in range(1 + adds)] + vectors

    return make


def _classes(shape: Shape) -> list[Tensor]:
    target = torch.randint(0, shape[1], (shape[0],), device=device())
    return [_random(*shape, scale=3.0), target]


def _classes_and_rows(shape: Shape) -> list[Tensor]:
    logits, target = _classes(shape)
    top = logits.float()
    largest = top.amax(1)
    log_sum = (top - largest.unsqueeze(1)).exp().sum(1).log()
    each = torch.rand_like(largest) + 0.5
    return [logits, target, largest, log_sum, each, -each]


def _ids_and_weight(shape: Shape) -> list[Tensor]:
    tokens, rows, width = shape
    ids = torch.randint(0, peers.RANKS * rows, (tokens,), device=device())
    return [ids, _random(rows, width)]


def _packed(shape: Shape) -> list[Tensor]:
    batch, length, width = shape
    return [_random(peers.RANKS, batch, length // peers.RANKS, width)]


def _passes(forward: int, backward: int = 0) -> Callable[[Shape], dict[str, int]]:
    """So many tensors of the shape, each of two bytes an element."""

    def moved(shape: Shape) -> dict[str, int]:
        found = {"forward": forward, "backward": backward}
        return {name: 2 * n * math.prod(shape) for name, n in found.items() if n}

    return moved


def _look_up_moved(shape: Shape) -> dict[str, int]:
    tokens, rows, width = shape
    here = tokens // peers.RANKS  # of which a row is read
    return {"forward": 2 * width * (tokens + here), "backward": 2 * width * (rows + here)}


def _sweep(**others: Shape) -> dict[str, Sequence[Shape]]:
    found: dict[str, Sequence[Shape]] = {"sweep": [(ELEMENTS // h, h) for h in WIDTHS]}
    return {**found, **{name.replace("_", "-"): [shape] for name, shape in others.items()}}


def ops() -> list[Op]:
    """Every kernel, at the sizes of Llama-3-70B with one sequence of 8192 tokens."""
    found = []
    norms = {"forward": [(1 << 15, 0.95)], "backward": [(1 << 13, 0.80), (1 << 14, 0.60)]}
    # under sequence parallelism a rank's norm has an eighth of the rows
    places = _sweep(TP_1=(8192, 8192), TP_8=(1024, 8192))
    for name, adds, shifts in (
        ("LayerNorm", False, True),
        ("RMSNorm", False, False),
        ("residual + LayerNorm", True, True),
        ("residual + RMSNorm", True, False),
    ):
        moved = _passes(4, 4) if adds else _passes(2, 3)
        inputs = _norm_inputs(adds, shifts)
        found.append(Op(name, inputs, moved, places, (3, 40), norms, "sweep"))
    places = _sweep(TP_1=(8192, 28672), TP_8=(8192, 3584))
    for name in ("bias + GeLU tanh", "bias + GeLU erf"):
        bars = {"forward": [(28672, 0.95)], "backward": [(28672, 0.85)]}
        inputs = _norm_inputs(False, False)
        found.append(Op(name, inputs, _passes(2, 3), places, (3, 40), bars))
    bars = {"forward": [(28672, 0.95)], "backward": [(28672, 0.90)]}
    for name in ("SwiGLU", "GeGLU tanh", "GeGLU erf"):
        found += [
            Op(name, lambda s: [_random(*s), _random(*s)], _passes(3, 5), places, (3, 40), bars),
            Op(
                f"{name} packed",
                lambda s: [_random(*s[:-1], 2 * s[-1])],
                _passes(3, 5),
                places,
                (3, 40),
                bars,
            ),
        ]
    places = {"TP-1": [(8192, 128256)], "TP-8": [(8192, 128256 // 8)]}
    bars = {"forward": [(128256, 0.80)]}
    for name, inputs, passes in (
        ("statistics", _classes, 1),
        ("gradient", _classes_and_rows, 2),
    ):
        name = f"cross entropy {name}"
        found.append(Op(name, inputs, _passes(passes), places, (3, 60), bars, "TP-8"))
    found.append(Op("cross entropy both", _classes, _passes(3), places, (3, 60)))
    # an unsharded table is not masked, and no kernel of tpplan's looks anything up in it
    places = {"TP-8": [(8192, 128256 // 8, 8192)]}
    bars = {"forward": [(8192, 0.80)]}
    found.append(Op("look-up", _ids_and_weight, _look_up_moved, places, (16, 4, 40), bars, "TP-8"))
    places = {"TP-8": [(2, 2048, 8192)]}
    bars = {"forward": [(8192, 0.90)]}
    for name, inputs in (("SP unpack", _packed), ("SP pack", lambda s: [_random(*s)])):
        found.append(Op(name, inputs, _passes(2), places, (2, 8, 20), bars, "TP-8"))
    return found


def _outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _with_gradients(op: Op, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The inputs, whose gradients are wanted where the op has a backward."""
    wanted = "backward" in op.moved(op.tiny)
    return [t.detach().requires_grad_(wanted and t.is_floating_point()) for t in inputs]


def _differentiable(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t for t in tensors if t.requires_grad]


def error(op: Op, function: peers.Function, shape: Shape) -> float:
    """The largest error of the results and gradients, over the largest value of each."""
    drawn = op.make(shape)
    ours = _with_gradients(op, drawn)
    exact = _with_gradients(op, [t.double() if t.is_floating_point() else t for t in drawn])
    got, expected = (_outputs(f(*t)) for f, t in ((function, ours), (peers.PLAIN[op.name], exact)))
    pairs = list(zip(got, expected, strict=True))
    if _differentiable(ours):
        grads = [torch.randn_like(t) for t in got]
        mine = torch.autograd.grad(got, _differentiable(ours), grads)
        theirs = torch.autograd.grad(expected, _differentiable(exact), [g.double() for g in grads])
        pairs += zip(mine, theirs, strict=True)
    errors = [
        ((a.double() - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()
        for a, b in ((a.detach(), b.detach()) for a, b in pairs)
    ]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def work_of(op: Op, function: peers.Function, direction: str, sets: list[list[Tensor]]) -> Work:
    """The calls that are timed, each on its input set."""
    inputs = [_with_gradients(op, one) for one in sets]
    if direction == "forward":
        return lambda number: function(*inputs[number])
    results = [_outputs(function(*one)) for one in inputs]
    grads = [[torch.randn_like(t) for t in one] for one in results]
    leaves = [_differentiable(one) for one in inputs]
    return lambda number: torch.autograd.grad(
        results[number], leaves[number], grads[number], retain_graph=True
    )


def copy_of(moved: int, sets: int) -> Work:
    """Copies that read half of so many bytes and write the other half."""
    sources = [_random(moved // 4) for _ in range(sets)]
    pairs = [(torch.empty_like(source), source) for source in sources]
    return lambda number: pairs[number][0].copy_(pairs[number][1])


@dataclass(frozen=True)
class Run:
    """What is measured, with what."""

    functions: Mapping[str, Mapping[str, peers.Function]]
    rounds: int

    def figures(self, op: Op, place: str, shape: Shape) -> Iterator[dict[str, Any]]:
        """A row for each direction of an op at one shape."""
        if "compile" in self.functions:
            torch._dynamo.reset()  # what was compiled for other shapes counts against a limit
        if "tpplan" in self.functions:
            found = error(op, self.functions["tpplan"][op.name], shape)
            if not found <= TOLERANCE:
                raise SystemExit(f"{op.name} {shape}: error {found:.1e} > {TOLERANCE:.1e}")
        for direction, moved in op.moved(shape).items():
            if torch.cuda.is_available():
                gc.collect()
                torch.cuda.empty_cache()
            times, left_out = self.times(op, direction, shape, moved)
            medians = {name: each.medians() for name, each in times.items()}
            copy = medians.pop("copy")["kernel_us"]
            for each in medians.values():
                each["share"] = copy / each["kernel_us"]
            yield {
                "kernel": op.name,
                "direction": direction,
                "place": place,
                "shape": list(shape),
                "bytes": moved,
                "copy_us": copy,
                "copy_TB_s": moved / copy / 1e6,
                "bar": op.bar(direction, place, shape),
                "variants": medians,
                "rounds": {name: each.kernel_us for name, each in times.items()},
                "left_out": left_out,
            }

    def times(
        self, op: Op, direction: str, shape: Shape, moved: int
    ) -> tuple[dict[str, Times], dict[str, str]]:
        """The rounds of a copy and of all variants; why some are left out."""
        sets, calls = turn_of(moved)
        drawn = [op.make(shape) for _ in range(sets)]
        works = {"copy": copy_of(moved, sets)}
        left_out = {}
        for name, functions in self.functions.items():
            if op.name not in functions:
                continue
            # Liger writes over what it is given
            own = [[t.clone() for t in one] for one in drawn] if name == "liger" else drawn
            try:
                works[name] = work_of(op, functions[op.name], direction, own)
            except Exception as failure:
                if name == "tpplan":
                    raise
                left_out[name] = f"{type(failure).__name__}: {failure}"
        waits = {name for name, kernel in peers.SYNCHRONIZING if kernel == op.name}
        turns, failed = prepare(works, sets, calls, waits, peers.PEERS)
        return measure(turns, self.rounds), {**left_out, **failed}


def title(row: Mapping[str, Any]) -> str:
    """A row's kernel, direction and shape."""
    shape = "x".join(map(str, row["shape"]))
    return f"{row['kernel']} {row['direction']} {row['place']} {shape}"


def print_rows(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Shares of the copy ceiling, and the times of tpplan."""
    heads = ["share of a copy's speed", "MB", "copy µs", "bar %"]
    heads += [f"{name} %" for name in names]
    own = "tpplan" in names
    lines = []
    for row in rows:
        variants = row["variants"]
        bar = "" if row["bar"] is None else f"{100 * row['bar']:.0f}"
        line = [title(row), f"{row['bytes'] / 1e6:.0f}", f"{row['copy_us']:.0f}", bar]
        line += [
            f"{100 * variants[name]['share']:.0f}" if name in variants else "-" for name in names
        ]
        if own:
            line += [f"{variants['tpplan'][kind]:.0f}" for kind in ("kernel_us", "wall_us")]
        lines.append(line)
    print(table(heads + (["tpplan µs", "wall µs"] if own else []), lines))
    for row in rows:
        for name, why in row["left_out"].items():
            print(f"{title(row)}: without {name}: {why}")


def missed_bars(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where tpplan is under its share of the ceiling, or slower than torch.compile or Liger."""
    missed = []
    for row in rows:
        variants = row["variants"]
        own = variants.get("tpplan")
        if own is None:
            continue
        if row["bar"] is not None and own["share"] < row["bar"]:
            missed.append(f"{title(row)}: {own['share']:.2f} of a copy's speed < {row['bar']:.2f}")
        missed += [
            f"{title(row)}: {own['kernel_us'] / variants[peer]['kernel_us']:.2f} x {peer}"
            for peer in ("compile", "liger")
            if peer in variants and own["kernel_us"] > NOISE * variants[peer]["kernel_us"]
        ]
    return missed


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], where: Mapping[str, str]) -> None:
    """One line for each variant of each row, with the machine and the versions."""
    keys = ("kernel", "direction", "place", "bytes", "bar", "copy_us")
    figures = ("kernel_us", "wall_us", "share")
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*keys, "shape", "variant", *figures, *where])
        for row in rows:
            shape = "x".join(map(str, row["shape"]))
            for name, times in row["variants"].items():
                cells = [*(row[key] for key in keys), shape, name, *(times[f] for f in figures)]
                writer.writerow([*cells, *where.values()])


def write_plot(path: Path, rows: Sequence[Mapping[str, Any]], where: Mapping[str, str]) -> None:
    """Shares of the copy ceiling over the width, a picture for each kernel of the sweep."""
    try:
        import matplotlib  # type: ignore[import-not-found,unused-ignore]

        matplotlib.use("agg")
        import matplotlib.pyplot as plt  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        print(f"{path} is not drawn: there is no matplotlib")
        return
    swept: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["place"] in ("sweep", "tiny"):
            swept.setdefault(f"{row['kernel']} {row['direction']}", []).append(row)
    across = 4
    down = max(1, math.ceil(len(swept) / across))
    figure, axes = plt.subplots(down, across, figsize=(4 * across, 3 * down), squeeze=False)
    for axis in axes.flat[len(swept) :]:
        axis.remove()
    for axis, (name, own) in zip(axes.flat, swept.items(), strict=False):
        for variant in sorted({v for row in own for v in row["variants"]}):
            points = [
                (row["shape"][-1], 100 * row["variants"][variant]["share"])
                for row in own
                if variant in row["variants"]
            ]
            axis.plot(*zip(*points, strict=True), marker="o", label=variant)
        axis.set(title=name, xscale="log", xlabel="width", ylabel="% of a copy", ylim=(0, 110))
        axis.legend(fontsize="x-small")
    figure.suptitle(header(where), fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


def cases(tiny: bool, only: str, widths: Sequence[int] | None) -> Iterator[tuple[Op, str, Shape]]:
    """What is measured: every kernel at each of its shapes, or at a tiny one."""
    for op in ops():
        if only not in op.name:
            continue
        places = {"tiny": [op.tiny]} if tiny else op.places
        for place, shapes in places.items():
            for shape in shapes:
                if place != "sweep" or widths is None or shape[-1] in widths:
                    yield op, place, shape


def main() -> int:
    """Compare, measure, print; the exit status."""
    parser = option_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="sizes for the interpreter, any place")
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels with it in their name")
    parser.add_argument("--widths", type=int, nargs="+", help="of the sweep, instead of all")
    parser.add_argument("--peers", nargs="*", choices=peers.PEERS, default=peers.PEERS)
    parser.add_argument("--rounds", type=int, default=15, help="turns each variant takes")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the sweep (svg, png)")
    options = parse(parser)
    if not torch.cuda.is_available():
        if not options.tiny:
            parser.error("there is no GPU: only --tiny can run, which measures nothing of use")
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton
        print("no GPU: the kernels are interpreted, and no figure below means anything")
    where = environment()
    print(header(where))
    on_one_stream()
    torch.manual_seed(0)
    found, left_out = peers.load(tuple(options.peers))
    for name, why in left_out.items():
        print(f"without {name}: {why}")
    functions = found if options.without_tpplan else {"tpplan": peers.ours(), **found}
    run = Run(functions, options.rounds)
    rows: list[dict[str, Any]] = []
    for op, place, shape in cases(options.tiny, options.only, options.widths):
        rows += run.figures(op, place, shape)
    print_rows(rows, list(functions))
    if options.csv is not None:
        write_csv(options.csv, rows, where)
    if options.plot is not None:
        write_plot(options.plot, rows, where)
    return finish(options, {"environment": where, "rows": rows}, missed_bars(rows))


if __name__ == "__main__":
    sys.exit(main())
