"""A training step of a slice of layers behind a slow link: waiting, deferring, in pieces.

Two gloo ranks of one thread each, whose collectives arrive when a link of a given bandwidth would
have sent them: each is sent by gloo, and its ``wait`` returns no sooner. The bandwidth is chosen so
that what is sent takes a given share of a step that waits, or that what backward sends takes as
long as the weights' gradients, the most that they can hide: there it is judged. All ways live in
the same processes and take turns. Before anything is timed, gradients of waiting and deferring are
compared bit for bit, and those of pieces to a relative 1e-5.
"""

# mypy: disable-error-code="no-untyped-call, call-arg, arg-type, attr-defined"
from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _register_process_group

from benchmarks.blocks import Block
from benchmarks.common import finish, on_ranks, option_parser, parse, table
from benchmarks.host_overhead import Stack, by_tpplan
from tpplan.comm import products
from tpplan.comm.pace import Pieces

RANKS, LAYERS, WIDTH, HEADS, INNER = 2, 4, 2048, 16, 6144
PIECES = 4
# of the step; none: what the weights' gradients can hide
SHARES = (0.3, None, 0.45, 0.6)
BAR = 0.75
SLOW = "slow"
NEVER = 1 << 62


class Arriving(dist.Work):
    """A collective of gloo's that has arrived once the link has sent it, too."""

    def __init__(self, work: Any, at: float) -> None:
        super().__init__()
        self._work, self._at = work, at

    def wait(self, timeout: Any = None) -> bool:
        """Until both."""
        self._work.wait()
        time.sleep(max(0.0, self._at - time.perf_counter()))
        return True


class SlowLink(dist.ProcessGroup):
    """Gloo's group, whose collectives go over one link of ``bandwidth`` bytes a second."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())
        self._inner, self._free = inner, 0.0
        self.bandwidth = float("inf")
        self.sent = 0

    def _arriving(self, work: Any, bytes_: int) -> Arriving:
        self.sent += bytes_
        self._free = max(time.perf_counter(), self._free) + bytes_ / self.bandwidth
        return Arriving(work, self._free)

    def _part(self, tensor: torch.Tensor) -> int:
        whole = tensor.numel() * tensor.element_size()
        return whole * (self.size() - 1) // self.size()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Arriving:  # type: ignore[override]
        """As of a group."""
        work = self._inner.allreduce(tensors, opts) if opts else self._inner.allreduce(tensors)
        return self._arriving(work, 2 * sum(map(self._part, tensors)))

    def allgather_into_tensor_coalesced(
        self, outs: list[torch.Tensor], xs: list[torch.Tensor], opts: Any = None
    ) -> Arriving:
        """As of a group."""
        (out,), (x,) = outs, xs
        return self._arriving(self._inner._allgather_base(out, x), self._part(out))

    def reduce_scatter_tensor_coalesced(
        self, outs: list[torch.Tensor], xs: list[torch.Tensor], opts: Any = None
    ) -> Arriving:
        """As of a group."""
        (out,), (x,) = outs, xs
        return self._arriving(self._inner._reduce_scatter_base(out, x), self._part(x))

    def getBackendName(self) -> str:
        """Its name."""
        return "slow"


@dataclass
class Way:
    """A model on this rank, and from how many multiplications on it defers."""

    module: nn.Module
    worth: int

    def step(self, x: torch.Tensor, grad: torch.Tensor) -> tuple[float, float]:
        """Seconds of forward and of backward."""
        self.module.zero_grad()
        products.WORTH = self.worth
        dist.barrier()
        start = time.perf_counter()
        y = self.module(x.detach().requires_grad_())
        middle = time.perf_counter()
        y.backward(grad)
        return middle - start, time.perf_counter() - middle

    def gradients(self) -> list[torch.Tensor]:
        """Of this rank's parameters."""
        return [p.grad.to_local().clone() for p in self.module.parameters()]  # type: ignore[union-attr, attr-defined]


def slow_mesh() -> tuple[DeviceMesh, SlowLink]:
    """The two ranks as a mesh whose group is a slow link."""
    inner = dist.new_group(list(range(RANKS)), backend="gloo")
    assert isinstance(inner, dist.ProcessGroup)
    link = SlowLink(inner)
    link._set_group_name(SLOW)
    link._set_group_desc("mesh_tp")
    _register_process_group(SLOW, link)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    return mesh, link


def ways(mesh: DeviceMesh, link: SlowLink, sp: bool) -> dict[str, Way]:
    """The same layers in each way; waiting and deferring are one model, in the same memory."""
    rest = {"rows kept": ("shard", "none")} if sp else {}
    asked = {"waiting": ("gathered", "none"), **rest, "in pieces": ("gathered", "chunked")}
    made = {}
    for name, (save, overlap) in asked.items():
        torch.manual_seed(0)
        stack: Any = Stack(Block(WIDTH, HEADS, INNER) for _ in range(LAYERS))
        options = {"inputs": torch.zeros(1, 16, WIDTH), "save": save, "overlap": overlap}
        module = by_tpplan(stack, mesh, sp, "layers.*.", prove=False, **options)
        over(module, link)
        in_pieces(module, PIECES)
        made[name] = Way(module, NEVER if name == "waiting" else 0)
        if name == "waiting":
            made["deferring"] = Way(module, 0)
    return made


def in_pieces(module: nn.Module, count: int) -> None:
    """Cut into so many, where anything is: the model of a GPU does not know this link."""
    for part in module.modules():
        state = vars(part).get("_tpplan")
        if state is not None and state.stream.pieces is not None:
            state.stream.pieces = Pieces(count)


def over(module: nn.Module, link: SlowLink) -> None:
    """Have the model's collectives go over ``link``."""
    slow = None
    for part in module.modules():
        state = vars(part).get("_tpplan")
        if state is None:
            continue
        if slow is None:
            slow = dataclasses.replace(state.stream.group, name=SLOW)
            state.stream.group = slow
        state.transition = dataclasses.replace(state.transition, group=slow)
        for entry in state.entries:
            entry.transition = dataclasses.replace(entry.transition, group=slow)
        state.own.group = slow


def measure(sp: bool, share: float | None, sequence: int, rounds: int) -> dict[str, Any]:
    """On a rank: the median seconds of forward and backward of each way, and without the link."""
    mesh, link = slow_mesh()
    made = ways(mesh, link, sp)
    torch.manual_seed(1)
    x, grad = torch.randn(2, 1, sequence, WIDTH).unbind(0)
    for way in made.values():
        way.step(x, grad)
    link.sent = 0
    made["waiting"].step(x, grad)
    sent = link.sent
    with torch.no_grad():
        made["waiting"].module(x)
    sent_backward = 2 * sent - link.sent
    due = made["waiting"].gradients()
    made["deferring"].step(x, grad)
    equal = all(map(torch.equal, due, made["deferring"].gradients()))
    made["in pieces"].step(x, grad)
    near = zip(due, made["in pieces"].gradients(), strict=True)
    equal = equal and all(bool((a - b).abs().max() <= 1e-5 * a.abs().max()) for a, b in near)

    def medians(names: Sequence[str]) -> dict[str, tuple[float, float]]:
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in names:
                times[name].append(_slowest(made[name].step(x, grad)))
        return {
            name: (
                statistics.median(f for f, _ in found),
                statistics.median(b for _, b in found),
            )
            for name, found in times.items()
        }

    computing = medians(["waiting"])["waiting"]
    made["waiting"].module.requires_grad_(False)
    weights = computing[1] - medians(["waiting"])["waiting"][1]
    made["waiting"].module.requires_grad_(True)
    if share is None:
        link.bandwidth = sent_backward / weights
    else:
        # sent / bandwidth = share of (computing + sent / bandwidth)
        link.bandwidth = sent * (1 - share) / (share * sum(computing))
    sending = sent / link.bandwidth
    return {
        "computing_s": sum(computing),
        "weights_s": weights,
        "sent_s": sending,
        "backward_s": sent_backward / link.bandwidth,
        "share": sending / (sending + sum(computing)),
        "ways": medians(list(made)),
        "equal": equal,
    }


def _slowest(times: tuple[float, float]) -> tuple[float, float]:
    worst = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    forward, backward = worst.tolist()
    return forward, backward


def rows_of(found: Mapping[str, Any]) -> list[list[str]]:
    """A way a row: milliseconds, what is exposed, and over the way that waits."""
    alone, waiting = found["computing_s"], found["ways"]["waiting"]
    rows = []
    for name, (forward, backward) in found["ways"].items():
        step = forward + backward
        rows.append(
            [
                name,
                f"{step * 1e3:.0f}",
                f"{backward * 1e3:.0f}",
                f"{(step - alone) * 1e3:.0f}",
                f"{step / sum(waiting):.2f}",
                f"{backward / waiting[1]:.2f}",
                f"{forward / waiting[0]:.2f}",
            ]
        )
    return rows


def main() -> int:
    """Measure, print; the exit status."""
    parser = option_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="turns each way takes")
    parser.add_argument("--sequence", type=int, default=256, help="tokens")
    options = parse(parser)
    figures: dict[str, Any] = {}
    missed: list[str] = []
    run: Callable[..., Any] = measure
    for mode, sp in {"TP": False, "TP+SP": True}.items():
        for share in SHARES:
            found = on_ranks(run, RANKS, sp, share, options.sequence, options.rounds)
            figures[f"{mode} {share or 'hidden'}"] = found
            what = f"{mode}, {found['share']:.0%} sent"
            heads = [
                what,
                "step ms",
                "backward",
                "exposed",
                "step ÷ waiting",
                "backward ÷",
                "forward ÷",
            ]
            print(table(heads, rows_of(found)))
            computing, weights, sent = (
                f"{found[name] * 1e3:.0f} ms" for name in ("computing_s", "weights_s", "backward_s")
            )
            print(f"computing {computing}, weights' gradients {weights}; backward sends {sent}\n")
            if not found["equal"]:
                missed.append(f"{what}: gradients are not equal")
            ratio = found["ways"]["deferring"][1] / found["ways"]["waiting"][1]
            if share is None and ratio > BAR:
                missed.append(f"{what}: backward {ratio:.2f} of waiting > {BAR}")
    return finish(options, figures, missed)


if __name__ == "__main__":
    sys.exit(main())
