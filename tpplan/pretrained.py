"""A transformers model from a folder, sharded before it has numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpplan.api import parallelize
from tpplan.checkpoint import load_checkpoint
from tpplan.models import build
from tpplan.shipped import PlanSource


def from_pretrained(
    path_or_config: str | Path | Any,
    plan: PlanSource = "auto",
    mesh: DeviceMesh | None = None,
    sequence_parallel: bool | None = None,
    kernels: str | Mapping[str, str] | None = None,
    *,
    inputs: Any = None,
    prove: bool = True,
) -> nn.Module:
    """A transformers model of a folder with ``config.json`` and safetensors files, sharded.

    It is built on the meta device, parallelized, and filled by ``load_checkpoint``: no rank ever
    holds more than its own part. Of a config (an object of transformers) the model is built whole
    on every rank and then sharded: with the same seed everywhere it has the values that the
    unsharded model has. In evaluation mode, as transformers' own function gives it.

    Args:
        plan, mesh, sequence_parallel, kernels, inputs, prove: as for ``parallelize``.

    Raises:
        ModelError: where there is no model of transformers.
        PlanError: where the plan does not fit it.
        CheckpointError: where the files do not.
    """
    if not isinstance(path_or_config, str | Path):
        model: nn.Module = _class_of(path_or_config)(path_or_config)
    else:
        model = build(str(path_or_config))
    parallelize(model, plan, mesh, sequence_parallel, kernels, inputs=inputs, prove=prove)
    if isinstance(path_or_config, str | Path):
        load_checkpoint(model, path_or_config)
        _read_generation(model, Path(path_or_config))
    return model.eval()


def _class_of(config: Any) -> Any:
    """The class that the config names, or the one for causal language models of its kind."""
    import transformers

    named = (getattr(transformers, name, None) for name in config.architectures or ())
    return next((found for found in named if found), transformers.AutoModelForCausalLM.from_config)


def _read_generation(model: Any, folder: Path) -> None:
    """How it is to generate, where its folder says so."""
    if (folder / "generation_config.json").exists() and hasattr(model, "generation_config"):
        kept = type(model.generation_config).from_pretrained(folder)
        model.generation_config = kept
