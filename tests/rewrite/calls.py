"""Ways to call a causal language model, and the comparison of two models under them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.compare import Findings, full, step
from tests.models import (
    padded,
    token_ids,
    weighed,
    weights_like,
)

Run = Callable[[Any], Mapping[str, torch.Tensor]]


# --- what is called: functions of a model that return named tensors (see tests.compare.step)


def logits_of(batch: int, length: int, seed: int, **call: Any) -> Run:
    """Logits of random ids, and a random weighing of them as the loss."""
    ids = token_ids(batch, length, seed)

    def run(model: Any) -> Mapping[str, torch.Tensor]:
        logits = model(input_ids=ids, **call).logits
        return {"logits": logits, "objective": weighed(logits)}

    return run


def masked(batch: int, length: int, seed: int, left: bool, positions: bool) -> Run:
    """With a padding mask, and the position ids a careful caller gives with it."""
    mask, position_ids = padded(batch, length, left)
    call = {"attention_mask": mask, **({"position_ids": position_ids} if positions else {})}
    return logits_of(batch, length, seed, **call)


def labelled(batch: int, length: int, seed: int) -> Run:
    """The model's own loss, where some labels are to be ignored; it leaves the logits sharded."""
    ids = token_ids(batch, length, seed)
    labels = ids.clone()
    labels[:, :2] = -100

    def run(model: Any) -> Mapping[str, torch.Tensor]:
        out = model(input_ids=ids, labels=labels)
        return {"logits": full(out.logits), "loss": out.loss, "objective": out.loss}

    return run


def base_model(batch: int, length: int, seed: int) -> Run:
    """A loss on what the model without its head yields."""
    ids = token_ids(batch, length, seed)

    def run(model: Any) -> Mapping[str, torch.Tensor]:
        hidden = model.model(input_ids=ids).last_hidden_state
        return {"last_hidden_state": hidden, "objective": weighed(hidden)}

    return run


def embedded(batch: int, length: int, seed: int) -> Run:
    """``inputs_embeds``, whose gradient is compared too."""
    embeds = weights_like(torch.empty(batch, length, 64), seed)

    def run(model: Any) -> Mapping[str, torch.Tensor]:
        dtype = next(model.parameters()).dtype
        given = embeds.to(dtype).requires_grad_()
        logits = model(inputs_embeds=given).logits
        objective = weighed(logits)
        (grad,) = torch.autograd.grad(objective, given, retain_graph=True)
        return {"logits": logits, "gradient of inputs_embeds": grad, "objective": objective}

    return run


def last_logits(batch: int, length: int, seed: int) -> Run:
    """``logits_to_keep=1``."""
    return logits_of(batch, length, seed, logits_to_keep=1)


def hidden_states(batch: int, length: int, seed: int) -> Run:
    """``output_hidden_states``: each of them, and a loss on all of them."""
    ids = token_ids(batch, length, seed)

    def run(model: Any) -> Mapping[str, torch.Tensor]:
        out = model(input_ids=ids, output_hidden_states=True)
        named = {f"hidden state {i}": h for i, h in enumerate(out.hidden_states)}
        return {**named, "logits": out.logits, "objective": weighed(out.logits, *out.hidden_states)}

    return run


def tuple_output(batch: int, length: int, seed: int) -> Run:
    """``return_dict=False``."""
    ids = token_ids(batch, length, seed)

    def run(model: Any) -> Mapping[str, torch.Tensor]:
        logits = model(input_ids=ids, return_dict=False)[0]
        return {"logits": logits, "objective": weighed(logits)}

    return run


def every_call() -> dict[str, Run]:
    """All that is compared for a model whose logits are whole."""
    return {
        "batch 1, length 16": logits_of(1, 16, 11),
        "batch 3, length 13": logits_of(3, 13, 12),
        "batch 2, length 3": logits_of(2, 3, 13),
        "batch 1, length 1": logits_of(1, 1, 14),
        "left padding": masked(3, 13, 15, left=True, positions=False),
        "left padding, position ids": masked(3, 12, 16, left=True, positions=True),
        "right padding": masked(3, 10, 17, left=False, positions=False),
        "labels": labelled(3, 13, 18),
        "labels, length 16": labelled(1, 16, 19),
        "last_hidden_state": base_model(3, 13, 20),
        "last_hidden_state, length 8": base_model(1, 8, 21),
        "inputs_embeds": embedded(2, 13, 22),
        "inputs_embeds, length 3": embedded(1, 3, 23),
        "logits_to_keep": last_logits(3, 13, 24),
        "output_hidden_states": hidden_states(2, 7, 25),
        "return_dict=False": tuple_output(1, 6, 26),
    }


def some_calls() -> dict[str, Run]:
    """A few of them, for variants of the model."""
    names = ("batch 3, length 13", "left padding, position ids", "labels", "last_hidden_state")
    calls = every_call()
    return {name: calls[name] for name in names}


def compare_calls(reference: Any, model: Any, calls: Mapping[str, Run], found: Findings) -> None:
    """Each call on both models, one after the other on the same two."""
    for name, run in calls.items():
        with found.case(name):
            found.add(name, step(reference, model, run))


# --- jobs
