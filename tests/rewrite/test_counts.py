"""What is sent: the floor of collectives, and exactly what the dry run predicts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import tpplan
from tests.compare import Errors, Findings, beyond, same
from tests.models import FAMILIES, SHARDED_LOGITS, hf, sharded, token_ids
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tpplan.simulate import Recorder

LAYERS = 3
Counts = dict[str, int]


def differentiable(out: Any) -> torch.Tensor:
    """What a dry run starts its backward from, where there is no loss: the logits."""
    logits = out.logits
    return logits.to_local() if isinstance(logits, DTensor) else logits


def measured(model: Any, ids: torch.Tensor, forwards: int = 1) -> Recorder:
    """Forward passes and one backward() through all of them, recorded."""
    model.zero_grad()
    with Recorder() as recorder:
        results = [differentiable(model(input_ids=ids)) for _ in range(forwards)]
        with recorder.during("backward"):
            torch.autograd.backward(results, [torch.ones_like(r) for r in results])
    return recorder


def counts(recorder: Recorder, phase: str) -> Counts:
    """How many collectives of each kind, without the kinds that do not occur."""
    kinds = [c.kind for c in recorder.collectives if c.phase == phase]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def ordered(collectives: Iterable[Any]) -> list[tuple[Any, ...]]:
    """What is compared of collectives; those of the first forward only are left out."""
    return [
        (c.phase, c.kind, c.module, c.shape, c.dtype, c.bytes, c.reason)
        for c in collectives
        if c.phase != "startup"
    ]


def floor(sp: bool, summed: bool) -> dict[str, Counts]:
    """Per phase, for logits that stay sharded; see ANCHORS, section 2."""
    n = 2 * LAYERS + 1
    both: Counts = {"all_gather": n, "reduce_scatter": n} if sp else {"all_reduce": n}
    return {
        "forward": both,
        "backward": both,
        "gradient_sync": {"all_reduce": 1} if summed else {},
    }


def counts_job(mesh: DeviceMesh, family: str, sp: bool) -> Errors:
    """Counts of one family, tied and not, of lengths tp divides and not."""
    found = Findings()
    expected = floor(sp, summed=sp or family == "Qwen3")
    for tied in (False, True):
        model = sharded(
            hf(family, num_hidden_layers=LAYERS, tie_word_embeddings=tied), mesh, sp, SHARDED_LOGITS
        )
        for batch, length in ((2, 16), (1, 13), (1, 3)):
            recorder = measured(model, token_ids(batch, length, length))
            for phase, want in expected.items():
                got = counts(recorder, phase)
                name = f"tied {tied}, length {length}, {phase}: {got} for {want}"
                found.add(name, same(got == want))
            strays = [c for c in recorder.collectives if c.reason.startswith("issued outside")]
            found.add(f"length {length}: of no module {strays[:1]}", same(not strays))
        recorder = measured(model, token_ids(1, 8, 1), forwards=2)
        got = counts(recorder, "gradient_sync")
        name = f"tied {tied}, two forwards, one backward: {got}"
        found.add(name, same(got == expected["gradient_sync"]))
        got = counts(recorder, "backward")
        want = {kind: 2 * n for kind, n in expected["backward"].items()}
        found.add(f"tied {tied}, two forwards, one backward: {got}", same(got == want))
    return found.errors


def prediction_job(mesh: DeviceMesh, family: str, sp: bool) -> list[tuple[str, str, list[Any]]]:
    """What this rank sent and, from dry runs of the first one amid the real ones, predicted."""
    found = []
    plans = (
        (SHARDED_LOGITS, "sharded logits", ((2, 16), (3, 13))),
        ("llama.yaml", "whole logits", ((3, 13),)),
    )
    for plan, name, sizes in plans:
        whole = hf(family, num_hidden_layers=LAYERS)
        model = sharded(whole, mesh, sp, plan)
        for batch, length in sizes:
            case = f"{name}, length {length}"
            real = measured(model, token_ids(batch, length, 1)).collectives
            found.append((case, "sent", ordered(real)))
            if mesh.get_rank() == 0:
                report = tpplan.dry_run(
                    whole, plan, mesh.size(), batch, length, sequence_parallel=sp
                )
                predicted = (c for c in report.collectives if c.phase != "optimizer")
                found.append((case, "predicted", ordered(predicted)))
    # the live group is back
    one = torch.ones(1)
    dist.all_reduce(one, group=mesh.get_group())
    assert one.item() == mesh.size()
    return found


def frozen_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Nothing is summed for parameters that are not trained, nor without a backward."""
    found = Findings()
    model = sharded(hf("Qwen3", num_hidden_layers=LAYERS), mesh, sp, SHARDED_LOGITS)
    ids = token_ids(1, 8, 1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.requires_grad_(False)
    got = counts(measured(model, ids), "gradient_sync")
    found.add(f"frozen: {got}", same(not got))
    biased = sharded(hf("Llama", mlp_bias=True), mesh, sp, SHARDED_LOGITS)
    biased.requires_grad_(False)
    biased.model.layers[-1].mlp.down_proj.bias.requires_grad_()
    got = counts(measured(biased, ids), "backward")
    head = {"reduce_scatter" if sp else "all_reduce": 1}
    found.add(f"all but a row-parallel bias: {got}", same(got == head))
    with torch.no_grad(), Recorder() as recorder:
        model(input_ids=ids)
    got = counts(recorder, "forward")
    found.add(f"no_grad: {got}", same(got == floor(sp, False)["forward"]))
    return found.errors


@SIZES
@MODES
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.turns(48)
def test_the_floor_is_met(ranks: Ranks, family: str, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, counts_job, family, sp))


@SIZES
@MODES
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.turns(48)
def test_the_dry_run_predicts_the_run(ranks: Ranks, family: str, tp: int, sp: bool) -> None:
    found = [case for rank in ranks.run(tp, prediction_job, family, sp) for case in rank]
    expected = {name: sent for name, kind, sent in found if kind == "predicted"}
    assert len(expected) == 3
    for name, _, sent in found:
        assert sent == expected[name], name


@MODES
def test_what_is_not_trained_is_not_summed(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, frozen_job, sp))


@MODES
@pytest.mark.turns(12)
def test_dry_run_counts_without_ranks(sp: bool) -> None:
    model = hf("Llama", device="meta", num_hidden_layers=LAYERS)
    report = tpplan.dry_run(model, SHARDED_LOGITS, 4, 1, 24, sequence_parallel=sp)
    for phase, want in floor(sp, summed=sp).items():
        assert {k: n for k, n in report.counts(phase).items() if n} == want
