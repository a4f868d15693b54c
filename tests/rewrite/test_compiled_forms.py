"""What a compiled model sends has the forms that inductor fuses with the products around it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import micro_pipeline_tp
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import beyond, step
from tests.models import hf, token_ids
from tests.ranks import Ranks
from tpplan.compat import enable_symmetric_memory

Found = tuple[list[int], list[bool]]
"""Of each all-gather, how many products take it; of each reduce-scatter, whether one makes it."""


def found(graph: fx.GraphModule) -> Found:
    """As the pass finds them, in inductor's spelling of views."""
    view_to_reshape(graph)
    gathers = micro_pipeline_tp.find_all_gather_patterns(graph.graph)
    scatters = micro_pipeline_tp.find_reduce_scatter_patterns(graph.graph)
    return (
        [len(micro_pipeline_tp._find_consumer_matmuls(one.res_node)) for one in gathers],
        [micro_pipeline_tp._find_producer_matmul(one.input_node) is not None for one in scatters],
    )


def forms(mesh: DeviceMesh, batch: int) -> tuple[dict[str, float], Found, Found]:
    """Of a Llama of two layers, whose head is computed from the rows of all: errors, graphs."""
    reference = hf(num_hidden_layers=2, attention_bias=False, mlp_bias=False)
    model = copy.deepcopy(reference)
    tpplan.parallelize(model, "llama.yaml", mesh, prove=False)
    graphs: list[Found] = []

    def spied(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        copied = fx.GraphModule(graph, copy.deepcopy(graph.graph))
        graphs.append(found(copied))
        return graph

    backend = aot_autograd(fw_compiler=spied, decompositions=select_decomp_table())
    torch._dynamo.reset()
    whole = torch.compile(model, backend=backend, fullgraph=True)
    ids = token_ids(batch, 16, 0)

    def run(m: nn.Module) -> dict[str, torch.Tensor]:
        out = (whole if m is model else m)(ids, labels=ids)
        return {"objective": out.loss, "logits": out.logits}

    errors = step(reference, model, run)
    forward, backward = graphs
    return errors, forward, backward


@pytest.mark.turns(12)
@pytest.mark.parametrize("batch", [1, 2])
def test_found(ranks: Ranks, batch: int) -> None:
    told = ranks.run(2, forms, batch)
    assert beyond([errors for errors, _, _ in told]) == {}
    for _, (gathered, scattered), (gathered_back, scattered_back) in told:
        # q, k, v; gate, up; of each layer; the head; and its logits, which no product takes
        assert gathered == [3, 2, 3, 2, 1, 0]
        # the embedding's sum is no product
        assert scattered == [False, True, True, True, True]
        # of the gradients that o_proj, down_proj take, and what enters the head
        assert gathered_back == [1, 1, 1, 1, 0]
        # one product's gradient; those of several are added before
        assert scattered_back == [True, False, False, False, False]


@pytest.mark.parametrize(("backend", "enabled"), [("gloo", []), ("nccl", ["tp"])])
def test_only_nccl(monkeypatch: pytest.MonkeyPatch, backend: str, enabled: list[str]) -> None:
    class Group:
        group_name = "tp"

    told: list[str] = []
    monkeypatch.setattr(dist, "get_backend", lambda _: backend)
    monkeypatch.setattr(
        "torch.distributed._symmetric_memory.enable_symm_mem_for_group", told.append
    )
    enable_symmetric_memory(Group())  # type: ignore[arg-type]
    assert told == enabled
