"""Caches of keys and values that a model keeps itself: a rank keeps its own heads of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, Findings, beyond, error, same
from tests.models import randomize
from tests.outside import gptfast, meta
from tests.outside.models import ids_of, plan_of
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES

Call = Callable[[nn.Module, torch.Tensor, int], torch.Tensor]
BATCH, PROMPT, STEPS = 2, 5, 4


def fast(kv_heads: int) -> nn.Module:
    config = gptfast.ModelArgs(n_local_heads=kv_heads)
    return gptfast.Transformer(config).setup_caches(16, BATCH)


def llama(cache: str) -> nn.Module:
    return meta.Transformer(meta.ModelArgs(cache=cache, max_seq_len=16))


def by_positions(model: nn.Module, ids: torch.Tensor, start: int) -> torch.Tensor:
    out: torch.Tensor = model(ids, torch.arange(start, start + ids.size(1)))
    return out


def by_start(model: nn.Module, ids: torch.Tensor, start: int) -> torch.Tensor:
    out: torch.Tensor = model(ids, start)
    return out


# a model, its rules, how it is called, where a cache is and the dimension of its heads
MODELS: Mapping[str, tuple[Callable[[], nn.Module], str, Call, str, int]] = {
    "gpt-fast": (
        lambda: fast(4), gptfast.RULES, by_positions, "layers.0.attention.kv_cache.k_cache", 1,
    ),
    "gpt-fast, two key-value heads": (
        lambda: fast(2), gptfast.RULES, by_positions, "layers.0.attention.kv_cache.v_cache", 1,
    ),
    "Meta's, buffers": (
        lambda: llama("buffer"), meta.RULES, by_start, "layers.1.attention.cache_k", 2,
    ),
    "Meta's, attributes": (
        lambda: llama("attribute"), meta.RULES, by_start, "layers.1.attention.cache_v", 2,
    ),
}  # fmt: skip


def held(model: Any, name: str) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    found: torch.Tensor = getattr(model.get_submodule(path), leaf)
    return found


def decoded_job(mesh: DeviceMesh, name: str, sp: bool) -> Errors:
    """A prompt, and then a token at a time."""
    make, rules, call, cache, dim = MODELS[name]
    found = Findings()
    reference = make()
    randomize(reference, 1)
    example = (ids_of(BATCH, PROMPT, 1), torch.arange(PROMPT) if call is by_positions else 0)
    model = tpplan.parallelize(
        copy.deepcopy(reference), plan_of(rules), mesh, sequence_parallel=sp, inputs=example
    )
    whole, own = held(reference, cache), held(model, cache)
    found.add("heads", same(own.size(dim) == max(1, whole.size(dim) // mesh.size())))
    with torch.no_grad():
        for step in range(1 + STEPS):
            start = 0 if step == 0 else PROMPT + step - 1
            ids = ids_of(BATCH, PROMPT if step == 0 else 1, 10 + step)
            theirs, ours = call(reference, ids, start), call(model, ids, start)
            found.add(f"step {step}", error(theirs, ours))
    first = mesh.get_local_rank() * whole.size(dim) // mesh.size()
    filled = held(reference, cache).narrow(dim, first, own.size(dim))
    found.add("cache", error(filled, held(model, cache)))
    return found.errors


@SIZES
@MODES
@pytest.mark.parametrize("name", MODELS)
def test_decoding(ranks: Ranks, name: str, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, decoded_job, name, sp))
