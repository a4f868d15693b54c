"""One Llama model of transformers, sharded by each of the ways to do it."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

from benchmarks.common import LLAMA

CONFIG = {**LLAMA, "max_position_embeddings": 512, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Source:
    """Where every variant's weights come from, and the mesh they are sharded on."""

    folder: Path
    mesh: DeviceMesh

    def model(self) -> LlamaForCausalLM:
        """A fresh unsharded model."""
        logging.disable_progress_bar()
        return LlamaForCausalLM.from_pretrained(self.folder)


def save_model(folder: Path) -> None:
    """Write the model, of seeded random weights, to ``folder``."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig.from_dict(CONFIG)).save_pretrained(folder)


def by_transformers(source: Source) -> nn.Module:
    """The tensor parallelism transformers ships, by its own plan.

    ``from_pretrained(folder, distributed_config=...)`` makes these two calls around its loading,
    but wants accelerate for that.
    """
    wanted = DistributedConfig(tp_size=source.mesh.size())
    sharding, _, meshes = LlamaForCausalLM.prepare_distribute_model(wanted)
    model: nn.Module = LlamaForCausalLM.maybe_distribute_model(source.model(), sharding, meshes)
    return model


def by_torch(source: Source) -> nn.Module:
    """torch's styles."""
    plan = torch_plan(CONFIG["num_hidden_layers"], sequence_parallel=False)
    return parallelize_module(source.model(), source.mesh, plan)


def by_torch_sequence_parallel(source: Source) -> nn.Module:
    """torch's styles with a sequence-sharded stream."""
    plan = torch_plan(CONFIG["num_hidden_layers"], sequence_parallel=True)
    return parallelize_module(source.model(), source.mesh, plan)


def torch_plan(layers: int, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """torch's styles of a Llama; one hand-placed input serves the layers that share it.

    With a sequence-sharded stream the embedding returns a DTensor, for the model reads positions
    and masks off its shape; from the first layer to the last norm the stream is plain.
    """
    shard, whole = Shard(1), Replicate()
    if not sequence_parallel:
        plan: dict[str, ParallelStyle] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=whole),
            "lm_head": ColwiseParallel(output_layouts=whole),
        }
        for layer in range(layers):
            plan |= _layer_plan(f"model.layers.{layer}", whole)
        return plan
    plan = {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=whole, output_layouts=shard, use_local_output=False
        ),
        "model.layers.0": PrepareModuleInput(
            input_layouts=(shard,), desired_input_layouts=(shard,), use_local_output=True
        ),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=shard, output_layouts=whole),
    }
    for layer in range(layers):
        plan |= _layer_plan(f"model.layers.{layer}", shard)
    return plan


def _layer_plan(layer: str, stream: Replicate | Shard) -> dict[str, ParallelStyle]:
    """The styles of one layer whose input and output lie as ``stream`` says."""
    whole = Replicate()
    plan: dict[str, ParallelStyle] = {
        f"{layer}.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": stream},
            desired_input_kwarg_layouts={"hidden_states": whole},
        ),
        **{f"{layer}.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        f"{layer}.self_attn.o_proj": RowwiseParallel(output_layouts=stream),
        f"{layer}.mlp": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(whole,)),
        f"{layer}.mlp.gate_proj": ColwiseParallel(),
        f"{layer}.mlp.up_proj": ColwiseParallel(),
        f"{layer}.mlp.down_proj": RowwiseParallel(output_layouts=stream),
    }
    if isinstance(stream, Shard):
        plan[f"{layer}.input_layernorm"] = SequenceParallel()
        plan[f"{layer}.post_attention_layernorm"] = SequenceParallel()
    return plan


def by_tpplan(source: Source, sequence_parallel: bool = False) -> nn.Module:
    """tpplan and the plan it ships."""
    import tpplan

    return tpplan.parallelize(
        source.model(), "llama.yaml", mesh=source.mesh, sequence_parallel=sequence_parallel
    )


def by_tpplan_sequence_parallel(source: Source) -> nn.Module:
    """tpplan and the plan it ships, with a sequence-sharded stream."""
    return by_tpplan(source, sequence_parallel=True)


VARIANTS: Mapping[str, Callable[[Source], nn.Module]] = {
    "tpplan TP": by_tpplan,
    "tpplan TP+SP": by_tpplan_sequence_parallel,
    "transformers TP": by_transformers,
    "torch TP": by_torch,
    "torch TP+SP": by_torch_sequence_parallel,
}


def variants_of(without_tpplan: bool) -> list[str]:
    """The names of what is compared."""
    return [v for v in VARIANTS if not (without_tpplan and v.startswith("tpplan"))]


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole gradient of every parameter; a collective."""
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}


class Trainer:
    """A model with its optimizer, as a training loop has them.

    One gradient clipping and one parameter group cannot hold plain tensors and DTensors together
    (``mixed``): their user keeps the two kinds apart, and so does this.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
        plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
        self.groups = [group for group in (sharded, plain) if group]
        self.optimizer = torch.optim.AdamW(
            [{"params": group} for group in self.groups], lr=1e-3, eps=1e-5, fused=True
        )

    @property
    def mixed(self) -> bool:
        """Whether the parameters are of two kinds."""
        return len(self.groups) > 1

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """The next-token loss."""
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    def step(self, tokens: torch.Tensor) -> float:
        """Forward, backward, clipping, update; the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(tokens)
        loss.backward()
        self.clip()
        self.optimizer.step()
        return loss.item()

    def clip(self) -> None:
        """Clip the norm of all gradients to 1."""
        if not self.mixed:
            nn.utils.clip_grad_norm_(self.groups[0], 1.0)
            return
        norms = [
            nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
            for group in self.groups
        ]
        whole = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
        total = torch.linalg.vector_norm(torch.stack(whole))
        for group in self.groups:
            nn.utils.clip_grads_with_norm_(group, 1.0, total)
