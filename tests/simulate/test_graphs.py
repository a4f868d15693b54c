"""What a compiled model's report says of its graphs, with torch's fused ops in their CPU forms."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, beyond, step
from tests.models import hf, token_ids
from tests.ranks import Ranks

Said = tuple[Errors, Counter[tuple[str, str, bool, str, str, tuple[int, ...]]], str]


@contextlib.contextmanager
def symmetric_memory() -> Iterator[None]:
    """Inductor takes every group for one that has it, and its ops run here."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter, "CPU")
    asked = dist.is_nccl_available
    dist.is_nccl_available = lambda: True
    try:
        with symmetric._test_mode():
            yield
    finally:
        dist.is_nccl_available = asked
        library._destroy()


def job(mesh: DeviceMesh, sp: bool, enabled: bool, dynamic: bool) -> Said:
    """Of a Llama of two layers: errors of its step, what its graphs send, and the report."""
    reference = hf(num_hidden_layers=2, attention_bias=False, mlp_bias=False)
    model = copy.deepcopy(reference)
    tpplan.parallelize(model, "llama.yaml", mesh, sequence_parallel=sp, prove=False)
    report = tpplan.FusionReport()
    torch._dynamo.reset()
    whole = torch.compile(model, options=report.options, dynamic=dynamic or None)
    ids = token_ids(2, 16, 0)

    def run(m: nn.Module) -> dict[str, torch.Tensor]:
        out = (whole if m is model else m)(ids, labels=ids)
        return {"objective": out.loss, "logits": out.logits}

    with symmetric_memory() if enabled else contextlib.nullcontext():
        errors = step(reference, model, run)
    found = Counter(
        (c.phase, c.kind, c.fused, c.module, c.reason, c.shape) for c in report.collectives
    )
    return errors, found, str(report)


WHOLE = (2, 16, 64)
FUSED = Counter(
    {
        ("forward", "all_gather", True, "", "lm_head", WHOLE): 1,
        ("backward", "reduce_scatter", True, "", "lm_head", WHOLE): 1,
        **{
            (phase, kind, True, f"model.layers.{i}.{module}", products, WHOLE): 1
            for i in range(2)
            for phase, kind, module, products in (
                ("forward", "all_gather", "self_attn", "q_proj, k_proj, v_proj"),
                ("forward", "reduce_scatter", "self_attn", "o_proj"),
                ("forward", "all_gather", "mlp", "gate_proj, up_proj"),
                ("forward", "reduce_scatter", "mlp", "down_proj"),
                ("backward", "all_gather", "self_attn", "o_proj"),
                ("backward", "all_gather", "mlp", "down_proj"),
            )
        },
    }
)


@pytest.mark.turns(16)
def test_fused(ranks: Ranks) -> None:
    for errors, found, text in ranks.run(2, job, True, True, False):
        assert beyond([errors]) == {}
        assert Counter({key: n for key, n in found.items() if key[2]}) == FUSED
        waiting = Counter((phase, kind) for phase, kind, fused, *_ in found if not fused)
        # the embedding's sum, the logits; gradients of what several products take, of the
        # embedding, and the sum of the norms'
        assert waiting == {
            ("forward", "reduce_scatter"): 1,
            ("forward", "all_gather"): 1,
            ("backward", "reduce_scatter"): 4,
            ("backward", "all_gather"): 1,
            ("backward", "all_reduce"): 1,
        }
        assert text.startswith("14 of 21 all-gathers and reduce-scatters in 2 compiled graphs are")
        assert "q_proj, k_proj, v_proj" in text


@pytest.mark.turns(64)
@pytest.mark.parametrize(
    ("sp", "enabled", "dynamic"),
    [(False, True, False), (True, False, False), (True, True, True)],
    ids=["all-reduces", "without symmetric memory", "one graph for all lengths"],
)
def test_not_fused(ranks: Ranks, sp: bool, enabled: bool, dynamic: bool) -> None:
    for errors, found, text in ranks.run(2, job, sp, enabled, dynamic):
        assert beyond([errors]) == {}
        assert found and not any(fused for _, _, fused, *_ in found)
        assert f"0 of {21 if sp else 1} all-gathers" in text


def test_nothing_compiled() -> None:
    assert str(tpplan.FusionReport()).startswith("0 of 0 all-gathers")
