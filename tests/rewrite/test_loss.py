"""The vocab-parallel cross entropy: in the model's own loss, and in the user's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import tpplan
from tests.compare import Errors, Findings, beyond, error, full, same, step
from tests.gpt import GPT
from tests.models import (
    SHARDED_LOGITS,
    VOCAB,
    hf,
    randomize,
    sharded,
    token_ids,
    weighed,
    weights_like,
)
from tests.ranks import RankError, Ranks
from tests.rewrite import MODES, SIZES
from tpplan.comm.collectives import Group, Site, chunk
from tpplan.comm.cross_entropy import Vocabulary, cross_entropy
from tpplan.simulate import Recorder

GATHERED_LOGITS: dict[str, Any] = {
    "tpplan": 1,
    "extends": "llama.yaml",
    "rules": {"lm_head": {"style": "vocab", "output": "gather"}},
}
LOSS = ["largest logit of each token", "sum of the exponentials", "logit of the target"]
Run = Callable[[Any], Mapping[str, torch.Tensor]]


# --- what the model's code and the user's do


def labelled(ids: torch.Tensor, **call: Any) -> Run:
    """The model's own loss, some labels ignored."""
    labels = ids.clone()
    labels[:, :3] = -100

    def run(model: Any) -> Mapping[str, torch.Tensor]:
        out = model(input_ids=ids, labels=labels, **call)
        return {"logits": full(out.logits), "loss": out.loss, "objective": out.loss}

    return run


def by_hand(ids: torch.Tensor, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Run:
    """The user's own loss on the logits and the next ids, one of them ignored."""
    labels = ids[:, 1:].clone()
    labels[0, 0] = -100

    def run(model: Any) -> Mapping[str, torch.Tensor]:
        logits = model(input_ids=ids).logits
        value = loss(logits[:, :-1], labels)
        objective = weighed(value) if value.dim() else value
        return {"logits": full(logits), "loss": value, "objective": objective}

    return run


def flat(**how: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """``F.cross_entropy`` of (tokens, classes)."""
    return lambda x, t: F.cross_entropy(x.reshape(-1, x.size(-1)), t.reshape(-1), **how)


def users_losses(vocab: int) -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """Every way to call the cross entropy, and some functions that are not it."""
    weight = weights_like(torch.empty(vocab), 3).abs()
    losses = {
        f"{reduction}, smoothing {smoothing}{', weighted' if w is not None else ''}": flat(
            reduction=reduction, label_smoothing=smoothing, weight=w
        )
        for reduction in ("mean", "sum", "none")
        for smoothing in (0.0, 0.1)
        for w in (None, weight)
    }
    criterion = nn.CrossEntropyLoss(ignore_index=5, label_smoothing=0.2)
    return losses | {
        "CrossEntropyLoss": lambda x, t: criterion(x.flatten(0, 1), t.flatten().clamp(min=0)),
        "classes in the middle": lambda x, t: F.cross_entropy(
            x.transpose(1, 2), t, reduction="none"
        ),
        "one token": lambda x, t: F.cross_entropy(x[0, 1], t[0, 1]),
        "size_average": flat(size_average=False),
        "softcap": lambda x, t: flat()(torch.tanh(x / 3.0) * 3.0, t),
        "float64": lambda x, t: flat()(x.double(), t),
        "bias": lambda x, t: flat()(x + weight, t),
        "probabilities": lambda x, t: F.cross_entropy(
            x.flatten(0, 1), F.softmax(weights_like(x, 4), -1).flatten(0, 1)
        ),
        "of itself": lambda x, t: F.cross_entropy(
            x.flatten(0, 1), (3 * x.detach()).flatten(0, 1).softmax(-1)
        ),
        "nll_loss": lambda x, t: F.nll_loss(x.flatten(0, 1).log_softmax(-1), t.flatten()),
        "z loss": lambda x, t: flat()(x, t) + x.logsumexp(-1).square().mean(),
        "some positions": lambda x, t: flat()(x[t > 20], t[t > 20]),
        "gather": lambda x, t: x.gather(-1, t.clamp(min=0).unsqueeze(-1)).square().mean(),
        "topk": lambda x, t: x.topk(3, -1).values.square().mean(),
        "some classes": lambda x, t: x[..., 60:80].square().mean(),
    }


# --- jobs


def labels_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """``labels=``, in vocabularies that tp divides and not."""
    found = Findings()
    for vocab in (136, VOCAB):
        reference = hf("Llama", vocab_size=vocab, num_hidden_layers=1)
        model = sharded(reference, mesh, sp)
        for batch, length in ((2, 16), (3, 13)):
            ids = token_ids(batch, length, length)
            name = f"vocabulary {vocab}, length {length}"
            found.add(name, step(reference, model, labelled(ids)))
            counted = labelled(ids, num_items_in_batch=torch.tensor(17))
            found.add(f"{name}, num_items_in_batch", step(reference, model, counted))
            kept = model(input_ids=ids, labels=ids).logits
            whole = reference(input_ids=ids).logits
            found.add(f"{name}: sharded in training", same(isinstance(kept, DTensor)))
            found.add(f"{name}: global shape", same(kept.shape == whole.shape))
        nothing = model(input_ids=ids, labels=torch.full_like(ids, -100)).loss
        found.add("all ignored: nan", same(bool(nothing.isnan())))
        total = model(input_ids=ids, labels=torch.full_like(ids, -100), num_items_in_batch=1).loss
        found.add("all ignored, summed: 0", same(total.item() == 0))
    return found.errors


def users_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """The user's own losses on logits that stay sharded."""
    found = Findings()
    reference = hf("Llama", num_hidden_layers=1)
    model = sharded(reference, mesh, sp, SHARDED_LOGITS)
    ids = token_ids(2, 9, 41)
    for name, loss in users_losses(VOCAB).items():
        with found.case(name):
            found.add(name, step(reference, model, by_hand(ids, loss)))
    return found.errors


def precision_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """float64 to rounding; bfloat16 better than torch has it; autocast's result in float32."""
    found = Findings()
    ids = token_ids(2, 9, 42)
    reference = hf("Llama", num_hidden_layers=1).double()
    model = sharded(reference, mesh, sp, SHARDED_LOGITS)
    losses = users_losses(VOCAB)
    for name in ("mean, smoothing 0.1", "none, smoothing 0.0"):
        run = by_hand(ids, losses[name])
        exact = {n: 1e7 * e for n, e in step(reference, model, run).items()}  # 1e-12
        found.add(f"float64, {name}", exact)
    group = Group.of(mesh)
    logits = 4 * weights_like(torch.empty(64, VOCAB), 1)
    target = token_ids(1, 64, 1).flatten()
    per_rank = chunk(VOCAB, group.size)
    mine = logits.split(per_rank, 1)[group.rank].bfloat16().requires_grad_()
    truth = logits.bfloat16().float().requires_grad_()
    expected = F.cross_entropy(truth, target, label_smoothing=0.1)
    expected.backward()
    site = Site("", "")
    vocabulary = Vocabulary(VOCAB, per_rank * group.rank, group, site, site, site)
    loss = cross_entropy(mine, target, vocabulary, label_smoothing=0.1)
    loss.backward()
    assert truth.grad is not None and mine.grad is not None
    gradient = truth.grad.split(per_rank, 1)[group.rank]
    found.add("bfloat16: dtype", same(loss.dtype == mine.grad.dtype == torch.bfloat16))
    # one rounding to bfloat16, of the result
    found.add("bfloat16: loss", 1e-3 * error(expected, loss.float()))
    found.add("bfloat16: gradient", 1e-3 * error(gradient, mine.grad.float()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dtypes = [
            F.cross_entropy(m(input_ids=ids).logits.flatten(0, 1), ids.flatten()).dtype
            for m in (reference.float(), model.float())
        ]
    found.add(f"autocast: {dtypes}", same(dtypes[0] == dtypes[1]))
    return found.errors


def second_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """A gradient penalty through the loss: gradients of gradients."""
    found = Findings()
    reference = hf("Llama", num_hidden_layers=1, attn_implementation="eager").double()
    model = sharded(reference, mesh, sp, SHARDED_LOGITS)
    embeds = weights_like(torch.empty(2, 9, 64, dtype=torch.float64), 1)
    labels = token_ids(2, 9, 43).flatten()

    def run(m: Any) -> Mapping[str, torch.Tensor]:
        x = embeds.clone().requires_grad_()
        logits = m(inputs_embeds=x).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return {"loss": loss, "gradient": grad, "objective": loss + grad.square().sum() * 1e3}

    found.add("penalty", step(reference, model, run))
    return found.errors


def recorded(model: Any, **call: Any) -> tuple[Any, list[tuple[str, str, tuple[int, ...], str]]]:
    """What a call answers, and the collectives at the head: kind, phase, shape and reason."""
    with Recorder() as recorder:
        out = model(**call)
        if out.loss is not None and out.loss.requires_grad:
            with recorder.during("backward"):
                out.loss.backward()
    at_head = [
        (c.kind, c.phase, c.shape, c.reason.removeprefix("cross entropy: "))
        for c in recorder.collectives
        if c.module == "lm_head" and "input" not in c.reason
    ]
    strays = [c for c in recorder.collectives if c.reason.startswith("issued outside")]
    assert not strays, strays
    return out, at_head


def counts_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Exactly three small all-reduces; a gather only for who asks for whole logits."""
    found = Findings()
    batch, length = 2, 13
    ids = token_ids(batch, length, 44)
    reference = hf("Llama", num_hidden_layers=1)
    expected = reference(input_ids=ids, labels=ids)
    three = [("all_reduce", "forward", (batch * length,), reason) for reason in LOSS]

    def gathers(recorded: list[Any]) -> int:
        rest = [c for c in recorded if c not in three]
        return len(rest) if all(c[:2] == ("all_gather", "forward") for c in rest) else -1

    for plan, name in (
        ("llama.yaml", "unstated"),
        (SHARDED_LOGITS, "shard"),
        (GATHERED_LOGITS, "gather"),
    ):
        model = sharded(reference, mesh, sp, plan)
        for training in (True, False):
            for given in (True, False):
                case = f"{name}, {'training' if training else 'eval'}, labels {given}"
                labels = {"labels": ids} if given else {}
                model.train(training)
                with torch.set_grad_enabled(training):
                    out, seen = recorded(model, input_ids=ids, **labels)
                kept = name == "shard" or (name == "unstated" and training and given)
                found.add(f"{case}: sharded", same(isinstance(out.logits, DTensor) == kept))
                found.add(f"{case}: {seen}", same(gathers(seen) == int(not kept)))
                found.add(f"{case}: losses", same([c for c in seen if c in three] == three * given))
                found.add(f"{case}: logits", error(expected.logits, full(out.logits)))
                if given:
                    found.add(f"{case}: loss", error(expected.loss, out.loss))
    model = sharded(reference, mesh, sp)
    with torch.inference_mode():
        out = model(input_ids=ids, labels=ids)
        found.add("inference mode, training", error(expected.loss, out.loss))
        out = model.eval()(input_ids=ids)
        found.add("inference mode", error(expected.logits, out.logits))
    # smoothing travels with the targets' logits
    model = sharded(reference, mesh, sp, SHARDED_LOGITS)
    logits = model(input_ids=ids).logits
    with Recorder() as recorder:
        F.cross_entropy(logits.view(-1, VOCAB), ids.view(-1), label_smoothing=0.1).backward()
    shapes = [c.shape for c in recorder.collectives if c.reason.startswith("cross entropy")]
    found.add(f"smoothing: {shapes}", same(shapes == [(26,), (26,), (2, 26)]))
    return found.errors


def predicted_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """A dry run with labels says what the run does, in training and in eval."""
    found = Findings()
    ids = token_ids(2, 13, 45)
    call = {"input_ids": ids, "labels": ids}
    for training in (True, False):
        whole = hf("Llama", num_hidden_layers=1).train(training)
        model = sharded(whole, mesh, sp)
        model(**call).loss.backward()
        model.zero_grad()
        with Recorder() as recorder:
            loss = model(**call).loss
            with recorder.during("backward"):
                loss.backward()
        if mesh.get_rank():
            continue
        report = tpplan.dry_run(
            whole, "llama.yaml", mesh.size(), sequence_parallel=sp, inputs=call, optimizer=None
        )
        sent = [c for c in recorder.collectives if c.phase != "startup"]
        real = [(c.phase, c.kind, c.module, c.shape, c.reason) for c in sent]
        said = [(c.phase, c.kind, c.module, c.shape, c.reason) for c in report.collectives]
        differing = [pair for pair in zip(said, real, strict=False) if pair[0] != pair[1]]
        found.add(f"training {training}: {len(said)}, {len(real)}", same(len(said) == len(real)))
        found.add(f"training {training}: {differing[:1]}", same(not differing))
        reasons = [c.reason for c in report.collectives if c.module == "lm_head"]
        found.add(
            f"training {training}: {reasons}",
            same(
                [r for r in reasons if r.startswith("cross")]
                == [f"cross entropy: {r}" for r in LOSS]
            ),
        )
    return found.errors


class Own(GPT):
    """A model whose own code does things to its logits before the loss."""

    def __init__(self, how: str) -> None:
        super().__init__(vocabulary=VOCAB)
        self.how = how
        self.register_buffer("bias", weights_like(torch.empty(VOCAB), 8))

    def forward(self, idx: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = super().forward(idx)
        if self.how == "softcap":
            logits = torch.tanh(logits / 0.3) * 0.3
        elif self.how == "buffer":
            logits = logits + self.bias
        elif self.how == "assigned":
            logits[:, :, 120:] = -5.0
            logits[..., [3, 70]] = self.bias[:2]
        elif self.how == "in place":
            logits.div_(2.0)
            logits += self.bias
        best = logits.argmax(-1)
        if labels is None:
            return logits, best
        shifted = logits[..., :-1, :].contiguous().view(-1, VOCAB)
        loss = F.cross_entropy(shifted, labels[..., 1:].contiguous().view(-1))
        return loss, logits, best


def own_code_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """What models do to their logits."""
    found = Findings()
    ids = token_ids(2, 13, 46)
    for how in ("softcap", "buffer", "assigned", "in place"):
        reference = Own(how).train()
        randomize(reference, 6)
        model = tpplan.parallelize(
            copy.deepcopy(reference), "gpt", mesh, sequence_parallel=sp, prove=False
        )

        def run(m: Any) -> Mapping[str, torch.Tensor]:
            loss, logits, best = m(ids, ids)
            whole, again = m(ids)
            objective = loss + weighed(whole) * 1e-2
            return {
                "loss": loss, "logits": full(logits), "best": best.double(), "whole": whole,
                "again": again.double(), "objective": objective,
            }  # fmt: skip

        with found.case(how):
            found.add(how, step(reference, model, run))
    return found.errors


def recomputed_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Checkpointing of the whole model, by the user, and of the head alone."""
    found = Findings()
    ids = token_ids(2, 13, 47)
    reference = hf("Llama", num_hidden_layers=1)
    model = sharded(reference, mesh, sp)

    def whole(m: Any) -> Mapping[str, torch.Tensor]:
        loss = checkpoint(lambda x: m(x, labels=x).loss, ids, use_reentrant=False)
        return {"loss": loss, "objective": loss}

    def head(m: Any) -> Mapping[str, torch.Tensor]:
        hidden = m.model(ids).last_hidden_state

        def loss_of(h: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(m.lm_head(h).flatten(0, 1), ids.flatten())

        loss = checkpoint(loss_of, hidden, use_reentrant=False)
        return {"loss": loss, "objective": loss}

    found.add("whole model", step(reference, model, whole))
    found.add("head", step(reference, model, head))
    return found.errors


def out_of_bounds(mesh: DeviceMesh) -> None:
    model = sharded(hf("Llama", num_hidden_layers=1), mesh, False)
    ids = token_ids(1, 4, 48)
    model(input_ids=ids, labels=ids + VOCAB)


# --- tests


@SIZES
@MODES
def test_labels(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, labels_job, sp))


@SIZES
@MODES
def test_the_users_own_loss(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, users_job, sp))


@SIZES
@MODES
def test_precision(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, precision_job, sp))


@SIZES
@MODES
def test_gradients_of_gradients(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, second_job, sp))


@SIZES
@MODES
def test_counts(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, counts_job, sp))


@SIZES
@MODES
def test_the_dry_run_predicts_the_loss(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, predicted_job, sp))


@SIZES
@MODES
def test_the_models_own_code(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, own_code_job, sp))


@MODES
def test_recomputed(ranks: Ranks, sp: bool) -> None:
    assert not beyond(ranks.run(2, recomputed_job, sp))


def test_targets_out_of_bounds(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"IndexError: Target \d+ is out of bounds"):
        ranks.run(2, out_of_bounds)


class Penalized(nn.Module):
    """Adds what its layer keeps of a weight to logits that it has computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layer = Kept()

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        logits = self.head(x + self.layer(x))
        other = logits.square().mean()
        return logits + self.layer.kept, other


class Kept(nn.Module):
    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.up.weight.square().mean()
        return self.down(self.up(x).tanh())


def penalized_job(mesh: DeviceMesh) -> Errors:
    rules = {"embed": "vocab", "layer.up": "colwise", "layer.down": "rowwise", "head": "vocab"}
    reference, ids = Penalized(), token_ids(2, 7, 0, 16)
    randomize(reference, 0, 0.5)
    plan = {"tpplan": 1, "rules": rules}
    made = copy.deepcopy(reference)
    model = tpplan.parallelize(made, plan, mesh, sequence_parallel=False, inputs=ids)

    def run(m: Any) -> Mapping[str, torch.Tensor]:
        logits, other = m(ids)
        weights = weights_like(logits, 1)
        return {"logits": logits, "other": other, "objective": (logits * weights).sum() + other}

    return step(reference, model, run)


@SIZES
def test_a_sum_over_a_sharded_weight_beside_sharded_logits(ranks: Ranks, tp: int) -> None:
    """Its gradient is a DTensor, as it is."""
    assert not beyond(ranks.run(tp, penalized_job))
