"""Keys and values that are trained, put into a cache by hand, as in prefix tuning."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.compare import Errors, Findings, beyond, error, same
from tests.models import hf, sharded, token_ids, weighed
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES

LENGTH, PREFIX = 9, 3


def parts(model: Any, heads: int, batch: int = 2) -> list[torch.Tensor]:
    """Keys and values of each layer: (batch, heads, prefix, width of a head)."""
    generator = torch.Generator().manual_seed(11)
    config = model.config
    shape = batch, heads, PREFIX, config.hidden_size // config.num_attention_heads
    return [torch.randn(shape, generator=generator) for _ in range(2 * config.num_hidden_layers)]


def logits_after(model: Any, prefix: list[torch.Tensor]) -> torch.Tensor:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for layer in range(len(prefix) // 2):
        cache.update(prefix[2 * layer], prefix[2 * layer + 1], layer)
    seen = torch.ones(2, LENGTH + PREFIX, dtype=torch.long)
    call = {"past_key_values": cache, "attention_mask": seen}
    logits: torch.Tensor = model(input_ids=token_ids(2, LENGTH, 5), **call).logits
    return logits


def gradients(model: Any, prefix: list[torch.Tensor]) -> list[torch.Tensor]:
    """The logits, and the prefix' gradients."""
    logits = logits_after(model, prefix)
    model.zero_grad()
    weighed(logits).backward()
    return [logits, *(x.grad for x in prefix if x.grad is not None)]


def shared_job(mesh: DeviceMesh, sp: bool) -> Errors:
    found = Findings()
    reference = hf(num_key_value_heads=1)
    model = sharded(reference, mesh, sp)
    for batch in (1, 2, 1):  # which call meets the prefix first is not to matter
        weighed(model(input_ids=token_ids(batch, LENGTH, 6)).logits).backward()
    frozen = parts(reference, 1)
    ours, theirs = (gradients(m, frozen) for m in (model, reference))
    found.add("frozen", error(theirs[0], ours[0]))
    # of the cache that the model made, gradients go to its own layers
    first = model(input_ids=token_ids(2, LENGTH, 6), use_cache=True)
    again = model(input_ids=token_ids(2, LENGTH, 7), past_key_values=first.past_key_values)
    weighed(first.logits, again.logits).backward()
    for kind in ("leaves", "made of leaves"):
        leaves = [x.requires_grad_() for x in parts(reference, 1)]
        said = ""
        try:
            gradients(model, leaves if kind == "leaves" else [2 * x for x in leaves])
        except RuntimeError as raised:
            said = str(raised)
        due = "the gradient of a tensor in 'past_key_values' is another one on each rank"
        found.add(kind, same(said.startswith(due)))
    return found.errors


def own_heads_job(mesh: DeviceMesh, sp: bool) -> Errors:
    """Where no head is on two ranks each has its own of the prefix, and their gradients."""
    found = Findings()
    reference = hf(num_key_value_heads=4)
    model = sharded(reference, mesh, sp)
    whole = [x.requires_grad_() for x in parts(reference, 4)]
    own = [x.detach().chunk(mesh.size(), 1)[mesh.get_rank()].clone() for x in whole]
    ours = gradients(model, [x.requires_grad_() for x in own])
    logits, *theirs = gradients(reference, whole)
    found.add("logits", error(logits, ours[0]))
    for number, (x, grad) in enumerate(zip(theirs, ours[1:], strict=True)):
        found.add(f"{number}", error(x.chunk(mesh.size(), 1)[mesh.get_rank()], grad))
    return found.errors


@SIZES
@MODES
def test_ranks_that_share_a_head(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, shared_job, sp))


@SIZES
@MODES
def test_heads_of_each_rank(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, own_heads_job, sp))
