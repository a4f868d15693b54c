"""TRL's trainers that compare answers, or sample them, with a sharded model."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, Findings, beyond, full
from tests.models import hf, randomize
from tests.ranks import Ranks
from tests.rewrite import MODES
from tests.trainers.test_sft import tokenizer
from tests.trainers.training import BATCH, STEPS, fresh, plain, watched

RATE = 0.5
SAMPLING = ("GRPO", "RLOO")
Trained = tuple[list[float], dict[str, torch.Tensor]]


def words(seed: int, count: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{i}" for i in torch.randint(3, 100, (count,), generator=generator))


def rows(kind: str) -> Any:
    """Questions with two answers, or without any."""
    from datasets import Dataset

    made = []
    for i in range(BATCH * STEPS):
        question, good, bad = words(3 * i, 5) + " ", words(3 * i + 1, 6), words(3 * i + 2, 4)
        made.append(
            {"chosen": question + good, "rejected": question + bad}
            if kind == "Reward"
            else {"prompt": question, "chosen": good, "rejected": bad}
            if kind == "DPO"
            else {"prompt": question, "completion": (good, bad)[i % 2], "label": i % 2 == 0}
            if kind == "KTO"
            else {"prompt": question}
        )
    return Dataset.from_list(made)


def model_of(kind: str, mesh: DeviceMesh | None, sp: bool) -> Any:
    import transformers

    model = hf()
    if kind == "Reward":
        config = copy.deepcopy(model.config)
        config.num_labels = 1
        model = transformers.LlamaForSequenceClassification(config)
        randomize(model, 1)
    if mesh is not None:
        tpplan.parallelize(model, "auto", mesh=mesh, sequence_parallel=sp, prove=False)
    return model


def lengths(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [float(len(text) % 7) for text in completions]


def trained(kind: str, mesh: DeviceMesh | None, sp: bool = False) -> Trained:
    """The losses of some steps, and the parameters after them."""
    import trl
    from tokenizers.pre_tokenizers import WhitespaceSplit

    losses: list[float] = []
    # Adam makes steps of one size of gradients that are nothing but rounding
    own: dict[str, Any] = {"optim": "sgd", "learning_rate": RATE, "bf16": False}
    more: dict[str, Any] = {}
    if kind in ("DPO", "KTO"):
        more["ref_model"] = model_of(kind, mesh, sp)
    if kind in SAMPLING:
        own.update(num_generations=BATCH, max_completion_length=6, beta=0.0)
        more["reward_funcs"] = lengths
    chosen = getattr(trl, f"{kind}Config")(**{**plain(tempfile.mkdtemp()), **own})
    by_words = tokenizer()
    by_words.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    model = model_of(kind, mesh, sp)
    watched(getattr(trl, f"{kind}Trainer"), losses)(
        model=model, args=chosen, train_dataset=rows(kind), processing_class=by_words, **more
    ).train()
    return losses, {name: full(p.detach()).clone() for name, p in model.named_parameters()}


def preferences_job(mesh: DeviceMesh, kind: str, sp: bool, alone: Trained) -> Errors:
    fresh()
    found = Findings()
    losses, parameters = trained(kind, mesh, sp)
    for step, (loss, right) in enumerate(zip(losses, alone[0], strict=True)):
        found.add(f"loss {step}", abs(loss - right))
    before = dict(model_of(kind, None, False).named_parameters())
    moved = max((p - before[name]).abs().max().item() for name, p in alone[1].items())
    apart = max((p - parameters[name]).abs().max().item() for name, p in alone[1].items())
    found.add("parameters", apart / moved)
    return found.errors


@MODES
@pytest.mark.turns(12)
@pytest.mark.parametrize("kind", ["DPO", "KTO", "Reward", *SAMPLING])
def test_training(pair: Ranks, kind: str, sp: bool) -> None:
    """As in one process; answers are sampled alike on the ranks of a tp group."""
    assert not beyond(pair.run(2, preferences_job, kind, sp, trained(kind, None)))
