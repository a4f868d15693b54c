"""What the trainers of other libraries look for on a model that is sharded already.

They wrap a model of more than one process in DistributedDataParallel and give each process
batches of its own, unless they know that it is sharded, and over how many ranks. transformers'
Trainer, and TRL's, ask the model and its config; ``accelerate.Accelerator.prepare`` asks nobody,
and is taught here. Neither library is imported: where a model is of theirs, they are there.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from tpplan.rewrite import plan_of

_TAUGHT = "_tpplan_prepare"


def introduce(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let trainers know that ``model`` is sharded over ``mesh``."""
    vars(model)["_ddp_params_and_buffers_to_ignore"] = _Refusal()
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is not None:
        for inner in _outermost(model, modeling.PreTrainedModel):
            _introduce_to_transformers(inner, mesh.size())
    accelerate = sys.modules.get("accelerate")
    if accelerate is not None:
        _teach(accelerate)


class _Refusal:
    """Read by DistributedDataParallel, of the module it is to wrap."""

    def __iter__(self) -> NoReturn:
        raise ValueError(
            "DistributedDataParallel cannot wrap a sharded model: its parameters would be plain "
            "tensors from then on, of which clip_grad_norm_ and checkpoints see one rank's part. "
            'For data parallelism apply fully_shard(model, mesh=mesh["dp"]) to it, after '
            "parallelize; over the ranks of the tp group alone nothing is to be wrapped"
        )


def _outermost(module: nn.Module, kind: type[nn.Module]) -> Iterator[Any]:
    if isinstance(module, kind):
        yield module
        return
    for child in module.children():
        yield from _outermost(child, kind)


def _introduce_to_transformers(model: Any, tp: int) -> None:
    """As transformers marks the models that it shards itself, so that Trainer leaves them whole.

    The config may be that of unsharded models as well: what it is given has sizes of 1.
    """
    model._tp_size = tp
    model._is_distributed_loading_by_transformers = True
    model.config.distributed_config = _sizes()(weakref.ref(model))


@functools.cache
def _sizes() -> Any:
    """The class of what Trainer asks for the number of different batches."""
    from transformers.distributed import DistributedConfig

    class Sizes(DistributedConfig):  # type: ignore[misc]
        """Those of an unsharded model, but that of data parallelism, where FSDP is at work."""

        def __init__(self, model: weakref.ref[Any]) -> None:
            self._model = model
            super().__init__()

        @property
        def dp_size(self) -> int:
            model = self._model()
            return 1 if model is None or not _managed(model) else data_parallel(model)

        def __reduce__(self) -> Any:
            return DistributedConfig, ()  # copies are for other models

    return Sizes


def _managed(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def data_parallel(model: nn.Module) -> int:
    """How many groups of ranks hold the model."""
    return dist.get_world_size() // _tp(model)


def _tp(model: nn.Module) -> int:
    """Over how many ranks it, or what is in it, is sharded; 1 where nothing is."""
    plans = (plan_of(module) for module in model.modules())
    return max((plan.tp for plan in plans if plan is not None), default=1)


def _teach(accelerate: Any) -> None:
    """Have every Accelerator take a sharded model as it is, and its tp group one batch."""
    kind = accelerate.Accelerator
    if hasattr(kind, _TAUGHT):
        return
    prepare, validate = kind.prepare, accelerate.ParallelismConfig._validate_accelerator

    @functools.wraps(prepare)
    def taught(self: Any, *args: Any, device_placement: Any = None) -> Any:
        if not self.is_fsdp2:  # else it applies fully_shard, as it was told how
            args = tuple(_as_it_is(self, arg) for arg in args)
        return prepare(self, *args, device_placement=device_placement)

    @functools.wraps(validate)
    def on_cpus(self: Any, accelerator: Any) -> None:
        # all it has against processes without GPUs is that none of its kinds is theirs
        on_cpu = accelerator.device.type == "cpu" and accelerator.num_processes > 1
        validate(self, _Several(accelerator) if on_cpu else accelerator)

    kind.prepare = taught
    setattr(kind, _TAUGHT, prepare)
    accelerate.ParallelismConfig._validate_accelerator = on_cpus


class _Several:
    """An Accelerator, of several devices."""

    multi_device = True

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def _as_it_is(accelerator: Any, given: Any) -> Any:
    """What an Accelerator is given; a sharded model as it does without anything around it."""
    if not isinstance(given, nn.Module) or (tp := _tp(given)) == 1:
        return given
    copies = data_parallel(given)
    if copies > 1 and not _managed(given):
        raise ValueError(
            f"{copies} tensor-parallel groups hold the model, and nothing averages their "
            'gradients: apply fully_shard(model, mesh=mesh["dp"]) before Accelerator.prepare'
        )
    if accelerator.state.device_mesh is None:  # it is asked for the batches alone
        names = ("dp_shard", "tp")
        mesh = init_device_mesh(accelerator.device.type, (copies, tp), mesh_dim_names=names)
        accelerator.state.device_mesh = mesh
    return accelerator.prepare_model(given, device_placement=False, evaluation_mode=True)
