"""Stages of a pipeline with tensor parallelism inside, made as users make them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

import tpplan
from tests.models import hf

LAYERS, BATCHES = 4, 4
SCHEDULES: Mapping[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "looped": ScheduleLoopedBFS,
    "zero bubble": ScheduleInterleavedZeroBubble,
    "zero bubble v": ScheduleZBVZeroBubble,
    "dual v": ScheduleDualPipeV,
}
SINGLE = ("1f1b", "gpipe")
FOLDED = ("zero bubble v", "dual v")  # the first rank has the last stage as well


@functools.cache
def pipeline_mesh() -> DeviceMesh:
    """Two stages of two ranks each."""
    return DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("pp", "tp"))


# beside Llama's: keys and values that ranks share, norms of each head
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "one kv head": ("Llama", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {}),
}


def whole(model: str = "llama") -> Any:
    """The unsharded model, the same on every rank."""
    family, changes = MODELS[model]
    return hf(family, num_hidden_layers=LAYERS, **changes)


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of the next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Sliced(nn.Module):
    """The user's own module around pieces of a model."""

    def __init__(self, model: Any, part: slice, first: bool, last: bool) -> None:
        super().__init__()
        self.embed = model.model.embed_tokens if first else None
        self.rotary = model.model.rotary_emb
        self.layers = nn.ModuleList(model.model.layers[part])
        self.norm, self.head = (model.model.norm, model.lm_head) if last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        positions = self.rotary(x, torch.arange(x.size(1))[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=positions)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


class Trimmed(nn.Module):
    """A whole model of which what other stages run is gone."""

    def __init__(self, model: Any, part: slice, first: bool, last: bool) -> None:
        super().__init__()
        self.model, self.first = model, first
        model.model.layers = nn.ModuleList(list(model.model.layers)[part])
        if not first:
            model.model.embed_tokens = nn.Identity()
        if not last:
            model.model.norm, model.lm_head = nn.Identity(), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = {"input_ids" if self.first else "inputs_embeds": x}
        # a copy: torch detaches it in place, which it refuses for views
        return self.model(**given, use_cache=False).logits.clone()  # type: ignore[no-any-return]


class Stage(PipelineStage):
    """Tries sizes on memory that has other values on every rank, as it happens to have."""

    def _to_tensor(self, arg: Any) -> torch.Tensor:
        x = super()._to_tensor(arg)
        if not isinstance(arg, torch.Tensor):
            with torch.no_grad():
                x.fill_(1 + dist.get_rank())
        return x


Made = tuple[nn.Module, dict[nn.Module, str]]


def _named(model: nn.Module) -> dict[nn.Module, str]:
    return {module: name for name, module in model.named_modules()}


def sliced(model: Any, sp: bool, part: slice, first: bool, last: bool) -> Made:
    """Pieces of a parallelized model."""
    _parallel(model, sp)
    return Sliced(model, part, first, last), _named(model)


def trimmed(model: Any, sp: bool, part: slice, first: bool, last: bool) -> Made:
    """A parallelized model, its products in pieces, trimmed."""
    _parallel(model, sp, overlap="chunked", save="shard" if sp else None)
    names = _named(model)
    return Trimmed(model, part, first, last), names


def copied(model: Any, sp: bool, part: slice, first: bool, last: bool) -> Made:
    """A deep copy of a parallelized model, trimmed."""
    model = copy.deepcopy(_parallel(model, sp))
    names = _named(model)
    return Trimmed(model, part, first, last), names


def before(model: Any, sp: bool, part: slice, first: bool, last: bool) -> Made:
    """A model that was trimmed, and then parallelized."""
    names = _named(model)
    stage = Trimmed(model, part, first, last)
    gone = [] if first else ["model.embed_tokens"]
    gone += [] if last else ["model.norm", "lm_head"]
    plan = {"tpplan": 1, "extends": "llama.yaml", "rules": dict.fromkeys(gone, "remove")}
    inputs = None if first else {"inputs_embeds": torch.zeros(2, 16, 64)}
    _parallel(model, sp, plan if gone else "llama.yaml", inputs)
    return stage, names


WAYS: Mapping[str, Callable[..., Made]] = {
    "sliced": sliced, "trimmed": trimmed, "copied": copied, "before": before,
}  # fmt: skip


def _parallel(
    model: Any, sp: bool, plan: Any = "llama.yaml", inputs: Any = None, **how: Any
) -> Any:
    mesh = pipeline_mesh()
    return tpplan.parallelize(
        model, plan, mesh, sequence_parallel=sp, inputs=inputs, prove=False, **how
    )


class Pipeline:
    """This rank's stages, and their schedule."""

    def __init__(
        self, way: str, schedule: str, sp: bool, model: str = "llama", shards: bool = False
    ) -> None:
        mesh = pipeline_mesh()
        self.shards = shards
        own, size = mesh["pp"].get_local_rank(), mesh["pp"].size()
        each = 1 if schedule in SINGLE else 2
        self.count = size * each
        self.indices = [own + size * n for n in range(each)]
        if schedule in FOLDED:
            self.indices = [own, self.count - 1 - own]
        self.parameters: dict[str, nn.Parameter] = {}
        self.stages = [self._stage(way, whole(model), index, sp) for index in self.indices]
        self.follow(schedule)

    def follow(self, schedule: str) -> None:
        """From the next step on."""
        stages = self.stages[0] if schedule in SINGLE else self.stages
        self.schedule = SCHEDULES[schedule](stages, n_microbatches=BATCHES, loss_fn=loss_of)

    def _stage(self, way: str, model: Any, index: int, sp: bool) -> Stage:
        each = LAYERS // self.count
        part = slice(each * index, each * (index + 1))
        module, names = WAYS[way](model, sp, part, index == 0, index == self.count - 1)
        for inner in module.modules():
            for name, parameter in inner.named_parameters(recurse=False):
                self.parameters[f"{names[inner]}.{name}"] = parameter
        if self.shards:
            tpplan.shard_stage(module, first=index == 0, last=index == self.count - 1)
        group = pipeline_mesh()["pp"].get_group()
        return Stage(module, index, self.count, torch.device("cpu"), group=group)

    def step(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Forward and backward of all microbatches; the mean loss where the last stage is."""
        first, last = 0 in self.indices, self.count - 1 in self.indices
        losses: list[torch.Tensor] = []
        given: dict[str, Any] = {"target": ids, "losses": losses} if last else {}
        self.schedule.step(*((ids,) if first else ()), **given)
        return torch.stack(losses).mean().detach() if last else None
