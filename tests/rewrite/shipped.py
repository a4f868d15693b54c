"""A model of the zoo in every way to send a step: all have the gradients of the waiting one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from benchmarks import zoo
from tests.compare import Errors, Findings, gradient_errors
from tests.rewrite.overlap import NEVER, differing, gradients
from tests.shipped import class_of, plans
from tpplan.comm.pace import Pieces
from tpplan.comm.products import deferring
from tpplan.comm.stream import Stream
from tpplan.compiled import CompiledPlan
from tpplan.planner import compile_plan
from tpplan.proof.exact import exact
from tpplan.rewrite import apply
from tpplan.simulate.recorder import Recorder

# one sequence and several, of a length that ranks divide, and of one that they do not
SHAPES = ((1, 8), (3, 7))
PIECES = {SHAPES[0]: 2, SHAPES[1]: 3}
FLOAT64 = "in pieces, in float64"
ROUNDING = "in pieces, by what it may differ"
# pieces add up in another order: of that no more than 1e-13 is left in float64. In float32 they
# are mostly 1e-6 from waiting, and where numbers cancel (gates, decays) as far as waiting is from
# what is exact, which is some 1e-5
TOLERANCE, OF_WAITING, MOST = 1e-5, 4.0, 1e-4
Grads = dict[str, torch.Tensor]
Sent = Counter[tuple[str, str]]


def cut(call: dict[str, Any], batch: int, length: int) -> dict[str, Any]:
    """An example of the zoo, of other sizes; images and states keep their length."""
    rows = torch.arange(batch) % zoo.BATCH

    def resized(t: torch.Tensor) -> torch.Tensor:
        t = t.unflatten(0, (zoo.BATCH, -1))[rows].flatten(0, 1)
        return t[:, :length] if t.dim() == 2 else t

    return tree_map_only(torch.Tensor, resized, call)  # type: ignore[no-any-return]


def stream_of(model: nn.Module) -> Stream:
    """What its rewritten modules share."""
    return next(m._tpplan.stream for m in model.modules() if "_tpplan" in vars(m))  # type: ignore


def compiled(label: str, tp: int, sp: bool) -> CompiledPlan:
    """The shipped plan on a model, its products in pieces."""
    model = zoo.makers()[label]()
    plan = replace(plans()[class_of(label)], overlap="chunked")
    return compile_plan(model, plan, tp, sp and plan.sequence_parallel, inputs=zoo.example(model))


class Stepping:
    """A sharded model, stepped in one of several ways."""

    def __init__(self, label: str, plan: CompiledPlan, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        model = zoo.makers()[label]()
        self.call = zoo.example(model)
        self.model: Any = apply(model, plan, mesh)
        self.weights: dict[tuple[int, int], torch.Tensor] = {}
        self.stream = stream_of(model)

    def step(
        self, shape: tuple[int, int], least: int = 0, keeps: bool = False, pieces: int = 1
    ) -> tuple[Grads, Sent]:
        """The gradients of this rank, and what was sent when.

        Args:
            least: the work from which a weight's gradient is deferred.
            keeps: whether rows are kept, in place of what is gathered.
            pieces: into how many a product is cut.
        """
        self.stream.saves_rows = keeps
        self.stream.pieces = Pieces(pieces) if pieces > 1 else None
        self.model.zero_grad()
        recorder = Recorder()
        with deferring(least), recorder:
            loss = self.objective(shape)
            with recorder.during("backward"):
                loss.backward()
        sent = Counter((c.phase, c.kind) for c in recorder.collectives if c.phase != "startup")
        return gradients(self.model), sent

    def objective(self, shape: tuple[int, int]) -> torch.Tensor:
        """A weighted sum of the logits; the weights are the same in every step."""
        logits = self.model(**cut(self.call, *shape)).logits
        if shape not in self.weights:  # drawn once: exact runs draw others
            self.weights[shape] = zoo.weights(logits.shape)
        return (logits * self.weights[shape]).sum()  # type: ignore[no-any-return]

    def widen(self) -> None:
        """In float64 from now on."""
        self.model.double()
        self.call = tree_map_only(
            torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, self.call
        )


def ways_job(mesh: DeviceMesh, label: str, plan: CompiledPlan) -> Errors:
    """Bit for bit where only the order of the work is another one, else but for rounding."""
    found = Findings()
    stepping = Stepping(label, plan, mesh)
    keeps = plan.sequence_parallel
    rounded: dict[tuple[int, int], tuple[Grads, Grads]] = {}
    for shape in SHAPES:
        due, sent = stepping.step(shape, NEVER)
        got, same = stepping.step(shape)
        found.add(f"{shape}: deferred: {differing(due, got)}", float(bool(differing(due, got))))
        found.add(f"{shape}: sent {same} for {sent}", float(same != sent))
        if keeps:
            got, more = stepping.step(shape, keeps=True)
            found.add(f"{shape}: rows: {differing(due, got)}", float(bool(differing(due, got))))
            others = {*(more - sent), *(sent - more)} - {("backward", "all_gather")}
            found.add(f"{shape}: more sent: {others}", float(bool(others or sent - more)))
        got, _ = stepping.step(shape, keeps=keeps, pieces=PIECES[shape])
        rounded[shape] = due, got
    stepping.widen()
    waiting = 0.0
    pieces: Errors = {}
    near: Errors = {}
    with exact():
        for shape in SHAPES:
            due, _ = stepping.step(shape, NEVER)
            got, _ = stepping.step(shape, keeps=keeps, pieces=PIECES[shape])
            found.add(f"{shape}: {FLOAT64}", _errors(due, got))
            theirs, ours = (_errors(due, grads) for grads in rounded[shape])
            waiting = max(waiting, *theirs.values())
            pieces |= {f"{shape}: {name}": e for name, e in ours.items()}
            near |= {f"{shape}: {name}": e for name, e in _errors(*rounded[shape]).items()}
    most = min(max(TOLERANCE, OF_WAITING * waiting), MOST)
    # near waiting, or as near to what is exact as waiting
    worst = {name: min(near[name] / TOLERANCE, e / most) for name, e in pieces.items()}
    found.add(ROUNDING, worst)
    return found.errors


def _errors(due: Grads, got: Grads) -> Errors:
    return gradient_errors(due, {name: g.to(due[name].dtype) for name, g in got.items()})
