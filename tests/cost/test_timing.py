"""The time model on steps made by hand, and what a report says of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch

import tpplan
from tests.gpt import GPT
from tpplan.cost import Hardware, Link, load_hardware
from tpplan.cost.costs import collective_seconds
from tpplan.cost.hardware import Efficiency
from tpplan.cost.timing import flops_by_module, summarize, timeline
from tpplan.language import PlanError
from tpplan.simulate.steps import Collective, Matmul, Member, Step

# 1 s: 100 FLOPs of float32, 200 of bfloat16, 10 bytes of memory, 5 over the link; half is reached
HARDWARE = Hardware(
    "toy",
    "",
    {"float32": 200.0, "bfloat16": 400.0},
    20.0,
    1e9,
    8,
    Link(10.0, 1e-9),
    Link(1.0, 1e-9),
    Efficiency(0.5, 0.5, 0.5, 0.5),
)


def sends(kind: str, elements: int = 20, phase: str = "forward", module: str = "m") -> Collective:
    """20 bfloat16 elements: an all-gather of two ranks takes 4 s."""
    return Collective(phase, module, kind, (elements,), "bfloat16", 0, "", ranks=2)


def step(
    *matmuls: tuple[int, int],
    moved: int = 0,
    sent: Collective | None = None,
    phase: str = "forward",
    layer: int | None = None,
    module: str = "m",
) -> Step:
    """``matmuls``: (FLOPs, bytes) of each."""
    element = None if layer is None else Member("layers", layer)
    done = tuple((Matmul(flops, size, "float32"), 1) for flops, size in matmuls)
    return Step(phase, module, element, done, moved=moved, collective=sent)


def seconds(*steps: Step) -> list[tuple[str, float]]:
    return [(span.bound, pytest.approx(span.seconds)) for span in timeline(steps, HARDWARE)]


def hidden(*steps: Step) -> list[float]:
    """What of each collective could overlap."""
    spans = timeline(steps, HARDWARE)
    return [pytest.approx(s.overlappable) for s in spans if s.lane == "communication"]


# --- the roofline


def test_matmuls_wait_for_flops_or_for_memory() -> None:
    """The ridge of this toy lies at 10 FLOPs per byte."""
    assert seconds(step((500, 50))) == [("flops", 5.0)]
    assert seconds(step((500, 49))) == [("flops", 5.0)]
    assert seconds(step((500, 60))) == [("memory", 6.0)]


def test_each_dtype_has_its_peak() -> None:
    run = [Step("forward", "m", None, ((Matmul(400, 1, dtype), 1),)) for dtype in
           ("bfloat16", "float32", "float64")]  # fmt: skip
    assert [span.seconds for span in timeline(run, HARDWARE)] == [2.0, 4.0, 4.0]


def test_everything_else_moves_bytes() -> None:
    assert seconds(step(moved=30)) == [("memory", 3.0)]
    assert seconds(step((100, 1), moved=30)) == [("flops", 1.0), ("memory", 3.0)]


def test_a_matmul_counts_as_often_as_it_occurs() -> None:
    (span,) = timeline([Step("backward", "m", None, ((Matmul(100, 1, "float32"), 3),))], HARDWARE)
    assert (span.seconds, span.what) == (3.0, "3 matmuls")


def test_collectives_cost_what_they_cost() -> None:
    c = sends("all_gather")
    (span,) = timeline([step(sent=c)], HARDWARE)
    assert span.seconds == collective_seconds("all_gather", 40, 2, HARDWARE) == pytest.approx(4.0)
    assert (span.lane, span.bound, span.what) == ("communication", "link", "all_gather (ring)")


def test_nothing_overlaps() -> None:
    run = [step((500, 1), moved=10), step(sent=sends("all_reduce")), step(moved=20)]
    spans = timeline(run, HARDWARE)
    for before, after in itertools.pairwise(spans):
        assert after.start == pytest.approx(before.start + before.seconds)
    total = summarize(run, HARDWARE).total
    assert total.compute == pytest.approx(5 + 1 + 2)
    assert total.communication == pytest.approx(8.0)
    assert spans[-1].start + spans[-1].seconds == pytest.approx(total.seconds)


def test_steps_without_work_take_no_time() -> None:
    assert timeline([step(), step(module="n")], HARDWARE) == ()
    nothing = summarize([], HARDWARE)
    assert (nothing.total.seconds, nothing.utilisation, dict(nothing.layers)) == (0.0, 0.0, {})


# --- what could overlap


def test_an_all_gather_with_the_matmuls_that_take_it() -> None:
    gather = step(sent=sends("all_gather"))
    assert hidden(gather, step((300, 1))) == [3.0]
    assert hidden(gather, step((300, 1)), step(), step((300, 1))) == [4.0]
    assert hidden(gather, step((100, 1)), step((100, 1)), step(moved=1), step((900, 1))) == [2.0]
    assert hidden(gather, step(moved=1), step((900, 1))) == [0.0]
    assert hidden(step((900, 1), sent=sends("all_gather"))) == [0.0]


@pytest.mark.parametrize(("kind", "takes"), [("reduce_scatter", 4.0), ("all_reduce", 8.0)])
def test_a_reduction_with_the_matmuls_that_make_it(kind: str, takes: float) -> None:
    assert hidden(step((300, 1), sent=sends(kind))) == [3.0]
    assert hidden(step((900, 1)), step(sent=sends(kind))) == [takes]
    # what the nearest matmuls make may be added up first; beyond that it is another input
    assert hidden(step((300, 1), moved=1), step(sent=sends(kind))) == [3.0]
    assert hidden(step((200, 1)), step((100, 1), moved=1), step(sent=sends(kind))) == [1.0]
    assert hidden(step((900, 1)), step(moved=1, sent=sends(kind))) == [0.0]
    assert hidden(step(sent=sends(kind)), step((900, 1))) == [0.0]


def test_an_input_gradient_with_the_weight_gradients() -> None:
    down = step((100, 1), (100, 1), moved=5, phase="backward")
    reduction = step(sent=sends("reduce_scatter", phase="backward"), phase="backward")
    assert hidden(down, reduction) == [2.0]


def test_a_matmul_hides_no_more_than_it_takes() -> None:
    """Between a gather and a reduction, as in an MLP without an activation."""
    gather, scatter = step(sent=sends("all_gather")), step(sent=sends("reduce_scatter"))
    assert hidden(gather, step((500, 1)), scatter) == [4.0, 1.0]


def test_no_further_than_the_next_collective_or_phase() -> None:
    scatter = sends("reduce_scatter")
    assert hidden(step((900, 1), sent=sends("all_gather")), step(sent=scatter)) == [0.0, 0.0]
    assert hidden(step((900, 1)), step(phase="backward", sent=sends("all_reduce", 20, "backward")),
                  ) == [0.0]  # fmt: skip
    gather = step(sent=sends("all_gather"))
    assert hidden(gather, step((900, 1), phase="backward")) == [0.0]


@pytest.mark.parametrize("phase", ["gradient_sync", "optimizer"])
def test_what_hides_behind_nothing(phase: str) -> None:
    done = "backward" if phase == "gradient_sync" else phase
    run = step((900, 1), phase=done, sent=sends("all_reduce", phase=phase))
    assert hidden(run) == [0.0]
    assert timeline([run], HARDWARE)[-1].phase == phase
    assert hidden(step((900, 1), sent=sends("all_to_all")), step((900, 1))) == [0.0]


# --- sums


def test_the_typical_layer() -> None:
    layers = [step((flops, 1), layer=i, sent=sends("reduce_scatter"))
              for i, flops in enumerate((900, 200, 300, 200))]  # fmt: skip
    back = [dataclasses.replace(s, phase="backward", collective=None) for s in layers]
    summary = summarize([step(moved=5), *layers, *back], HARDWARE)
    layer = summary.layers["layers"]
    assert (layer.index, layer.count) == (3, 4)
    assert layer.total.compute == pytest.approx(4.0)
    assert layer.total.ratio == pytest.approx(1.0)
    assert layer.phases["forward"].ratio == pytest.approx(2.0)
    assert layer.phases["backward"].communication == 0.0


def test_phases_add_up() -> None:
    run = [step((300, 1)), step((600, 1), phase="backward"),
           step(phase="backward", sent=sends("all_reduce", phase="gradient_sync")),
           step(moved=10, phase="optimizer")]  # fmt: skip
    summary = summarize(run, HARDWARE)
    assert list(summary.phases) == ["forward", "backward", "gradient_sync", "optimizer"]
    assert sum(s.seconds for s in summary.phases.values()) == pytest.approx(summary.total.seconds)
    assert summary.phases["gradient_sync"].compute == 0.0


def test_utilisation_is_of_the_peak() -> None:
    run = [step((900, 1)), step(moved=10), Step("forward", "m", None,
                                                ((Matmul(400, 1, "bfloat16"), 1),))]  # fmt: skip
    summary = summarize(run, HARDWARE)
    assert summary.flops == 1300
    assert summary.utilisation == pytest.approx((900 / 200 + 400 / 400) / (9 + 1 + 2))
    recomputed = summarize(run, HARDWARE, model_flops=650)
    assert recomputed.utilisation == pytest.approx(summary.utilisation / 2)
    assert recomputed.flops == 1300


def test_flops_by_module() -> None:
    run = [step((5, 1), (6, 1), module="a"), step(module="b"), step((7, 1), phase="backward",
                                                                    module="a")]  # fmt: skip
    assert dict(flops_by_module(run)) == {"a": 18}


# --- in reports


def dry_run(**options: Any) -> Any:
    with torch.device("meta"):
        model = GPT()
    return tpplan.dry_run(model, "gpt", 2, 1, 8, **options)


def test_a_report_says_its_time() -> None:
    report = dry_run(hardware="a100-nvlink")
    data = json.loads(json.dumps(report.to_dict()))
    assert data["hardware"] == report.hardware.to_dict()
    assert data["time"]["modelled"] is True
    assert "without kernel launches" in data["time"]["note"]
    assert data["time"]["hardware"] == "a100-nvlink"
    assert data["time"]["seconds"] == pytest.approx(report.time.total.seconds)
    assert set(data["time"]["phases"]) == {"forward", "backward", "gradient_sync", "optimizer"}
    last = report.timeline[-1]
    assert last.start + last.seconds == pytest.approx(report.time.total.seconds)
    sent = [s for s in report.timeline if s.lane == "communication"]
    assert [s.module for s in sent] == [c.module for c in report.collectives]
    (stack,) = report.time.layers.values()
    assert stack.total.communication > 0
    assert report.time.flops == sum(flops_by_module(report.steps).values())
    faster = dataclasses.replace(report, hardware=load_hardware("b200-nvlink"))
    assert faster.time.total.seconds < report.time.total.seconds


def test_recomputed_flops_are_no_use() -> None:
    plain = dry_run(optimizer=None)
    again = dry_run(optimizer=None, checkpointing=True)
    assert plain.hardware.name == "h100-nvlink"
    assert again.time.flops > plain.time.flops
    work = plain.time.utilisation * plain.time.total.seconds
    assert again.time.utilisation * again.time.total.seconds == pytest.approx(work)


def test_hardware_is_checked_first() -> None:
    with pytest.raises(PlanError, match="did you mean 'h100-nvlink'"):
        tpplan.dry_run(GPT(), "gpt", 2, hardware="h100nvlink")
