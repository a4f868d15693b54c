"""A dry run against a run: every shipped plan, on gloo ranks, collective by collective."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import tpplan
from benchmarks import zoo
from tests.ranks import Ranks
from tpplan.api import shipped_plans
from tpplan.report import Collective, Recorder
from tpplan.report.execute import objective

WAYS = [(tp, sp) for tp in (2, 4) for sp in (False, True)]
EVERYTHING = os.environ.get("TPPLAN_ZOO") == "all"


def listed() -> list[str]:
    """The zoo's models that a shipped plan lists."""
    classes = {cls for plan in shipped_plans() for cls in plan.models}
    return [label for label in zoo.makers() if class_of(label) in classes]


def class_of(label: str) -> str:
    """The name of the class that the zoo builds under this label."""
    name, _, cls = label.partition(" (")
    kind = zoo.VARIANTS[name][0] if name in zoo.VARIANTS else name
    return cls.removesuffix(")") or str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])


def cases() -> list[tuple[str, int, bool]]:
    """Model, tp, sequence parallelism: all four ways, or one of them for each plan in turn."""
    if EVERYTHING:
        return [(label, tp, sp) for label in listed() for tp, sp in WAYS]
    plans = {tpplan.load_plan("auto", zoo.makers()[label]()).name: label for label in listed()}
    return [(label, *WAYS[i % len(WAYS)]) for i, label in enumerate(plans.values())]


# in training its code multiplies by the weight of another module, which is a DTensor
IN_EVALUATION = {"Gemma3nForCausalLM"}


def built(label: str) -> Any:
    """A small model with random weights."""
    model = zoo.makers()[label]()
    return model.eval() if class_of(label) in IN_EVALUATION else model


def sent(collectives: Iterable[Collective]) -> list[tuple[Any, ...]]:
    """What is compared of collectives; those of the first forward only are left out."""
    return [
        (c.phase, c.kind, c.module, c.shape, c.dtype, c.bytes, c.dimension, c.ranks, c.reason)
        for c in collectives
        if c.phase != "startup"
    ]


def step_job(mesh: DeviceMesh, name: str, sp: bool) -> list[tuple[Any, ...]]:
    """Forward, backward, clipping and a step of AdamW; what this rank sent."""
    model = built(name)
    call = zoo.example(model)
    plan = tpplan.load_plan("auto", model)
    tpplan.parallelize(model, plan, mesh, sequence_parallel=sp, inputs=call)
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder({mesh.get_group().group_name: "tp"}) as recorder:
        out = model(**call)
        with recorder.during("backward"):
            result = objective(out)
            assert result is not None
            result.backward(torch.ones_like(result))
        with recorder.during("optimizer"):
            trained = [p for p in model.parameters() if p.grad is not None]
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
    return sent(recorder.collectives)


@pytest.mark.parametrize(("name", "tp", "sp"), cases())
def test_what_is_predicted_is_sent(ranks: Ranks, name: str, tp: int, sp: bool) -> None:
    model = built(name)
    plan = tpplan.load_plan("auto", model)
    sp = sp and plan.sequence_parallel
    report = tpplan.dry_run(model, plan, tp, inputs=zoo.example(model), sequence_parallel=sp)
    predicted = sent(report.collectives)
    for measured in ranks.run(tp, step_job, name, sp):
        assert measured == predicted
