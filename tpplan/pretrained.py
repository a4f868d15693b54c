"""A transformers model from a folder, sharded before it has numbers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from tpplan.api import parallelize
from tpplan.checkpoint import load_checkpoint
from tpplan.checkpoint.files import CheckpointError, stored_in
from tpplan.checkpoint.initial import Initial
from tpplan.models import ModelError, build
from tpplan.observe.caches import no_fakes_kept
from tpplan.rewrite.world import broadcast, own_mesh
from tpplan.shipped import PlanSource
from tpplan.wrapping import adapted_model

_META = torch.device("meta")


def from_pretrained(
    path_or_config: str | Path | Any,
    plan: PlanSource = "auto",
    mesh: DeviceMesh | None = None,
    sequence_parallel: bool | None = None,
    kernels: str | Mapping[str, str] | None = None,
    *,
    adapt: Callable[[nn.Module], nn.Module] | None = None,
    inputs: Any = None,
    prove: bool = True,
    strict: bool = True,
) -> nn.Module:
    """A transformers model of a folder with ``config.json`` and safetensors files, sharded.

    It is built on the meta device, parallelized, and filled by ``load_checkpoint``: no rank ever
    holds more than its own part. Of a config (an object of transformers) it is a new model, with
    the values that the unsharded one has where the first rank's random state is; a rank holds its
    own part and one whole tensor at a time. A model whose code looks at its numbers while it is
    built is built whole on every rank, with a warning. In evaluation mode, as transformers' own
    function gives it.

    Args:
        plan, mesh, sequence_parallel, kernels, inputs, prove: as for ``parallelize``.
        adapt: is given the model before it is sharded, while it is on the meta device, and returns
            what is to be: with peft's adapters, say, whose numbers are the first rank's.

    Raises:
        ModelError: where there is no model of transformers, or ``adapt`` returns none.
        PlanError: where the plan does not fit it.
        CheckpointError: where the files do not.
    """
    how = (plan, mesh, sequence_parallel, kernels)
    if not isinstance(path_or_config, str | Path):
        own, _, _ = own_mesh(mesh)
        make = functools.partial(_class_of(path_or_config), path_or_config)
        made = _made(lambda: _adapted(make(), adapt), own)
        model = made.model if isinstance(made, Initial) else made
        parallelize(model, *how, inputs=inputs, prove=prove)
        if isinstance(made, Initial):
            made.fill()
        return model.eval()
    model = _adapted(build(str(path_or_config), _dtype_in(Path(path_or_config))), adapt)
    parallelize(model, *how, inputs=inputs, prove=prove)
    load_checkpoint(model, path_or_config, strict)
    _read_generation(adapted_model(model), Path(path_or_config))
    return model.eval()


class _KeepsNumbers(TorchDispatchMode):
    """What has numbers is not moved to the meta device, as peft does with what it adds there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        moved = func is torch.ops.aten._to_copy.default and kwargs.get("device") == _META
        return func(*args, **{**kwargs, "device": args[0].device} if moved else kwargs)


def _adapted(model: nn.Module, adapt: Callable[[nn.Module], nn.Module] | None) -> nn.Module:
    if adapt is None:
        return model
    with _KeepsNumbers():
        adapted: Any = adapt(model)
    if not isinstance(adapted, nn.Module):
        raise ModelError(f"adapt returned a {type(adapted).__name__}, not an nn.Module")
    return adapted


def _made(make: Callable[[], nn.Module], mesh: DeviceMesh | None) -> nn.Module | Initial:
    """A new model: whole in one process, and otherwise with values for later.

    All ranks draw from the random state of the first; theirs goes on from there where it is that.
    """
    if mesh is None or mesh.size() == 1:
        return make()
    own = torch.get_rng_state()
    first = broadcast(own, mesh)
    torch.set_rng_state(first)
    try:
        with no_fakes_kept():
            return Initial(make)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(f"the model is built whole on every rank: {text}", stacklevel=3)
        torch.set_rng_state(first)
        return make()
    finally:
        if not torch.equal(own, first):
            torch.set_rng_state(own)


def _class_of(config: Any) -> Any:
    """The class that the config names, or the one for causal language models of its kind."""
    import transformers

    named = (getattr(transformers, name, None) for name in config.architectures or ())
    return next((found for found in named if found), transformers.AutoModelForCausalLM.from_config)


def _dtype_in(folder: Path) -> torch.dtype | None:
    """Of the first numbers in the files, as transformers takes it."""
    try:
        dtypes = [stored.dtype for stored in stored_in(folder).values()]
    except CheckpointError:  # which is said when they are read
        return None
    return next((d for d in dtypes if d.is_floating_point and d.itemsize > 1), None)


def _read_generation(model: Any, folder: Path) -> None:
    """How it is to generate, where its folder says so."""
    if (folder / "generation_config.json").exists() and hasattr(model, "generation_config"):
        kept = type(model.generation_config).from_pretrained(folder)
        model.generation_config = kept
