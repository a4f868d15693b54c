"""What the trainers of other libraries look for on a model that is sharded already.

They wrap a model of more than one process in DistributedDataParallel and give each process
batches of its own, unless they know that it is sharded, and over how many ranks. transformers'
Trainer, and TRL's, ask the model and its config; ``accelerate.Accelerator`` asks nobody, and is
taught here. Neither library is imported: where a model is of theirs, they are there.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import RandomSampler

from tpplan.checkpoint import teach_saving, whole_state
from tpplan.resizing import teach_resizing
from tpplan.rewrite import plan_of

_TAUGHT = "_tpplan_taught"


def introduce(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let trainers know that ``model`` is sharded over ``mesh``."""
    vars(model)["_ddp_params_and_buffers_to_ignore"] = _Refusal()
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is not None:
        teach_saving(modeling.PreTrainedModel)
        teach_resizing(modeling.PreTrainedModel)
        for inner in _outermost(model, modeling.PreTrainedModel):
            _introduce_to_transformers(inner, mesh.size())
    accelerate = sys.modules.get("accelerate")
    if hasattr(accelerate, "ParallelismConfig"):  # those before 1.10 know of no sharded models
        _teach(accelerate)


def introduce_experts(model: nn.Module, ep: int) -> None:
    """Let DistributedDataParallel average all but the experts that the ``ep`` ranks share."""
    vars(model)["_ddp_params_and_buffers_to_ignore"] = _Shared(weakref.ref(model), ep)


class _Shared:
    """Read by DistributedDataParallel: the parameters whose gradients are means already."""

    def __init__(self, model: weakref.ref[nn.Module], ep: int) -> None:
        self.model, self.ep = model, ep

    def __iter__(self) -> Iterator[str]:
        model = self.model()
        if dist.get_world_size() != self.ep:
            raise ValueError(
                "DistributedDataParallel cannot average the experts of ep ranks over others: apply "
                'fully_shard(experts, mesh=mesh["dp"]) to them, and fully_shard over dp and ep to '
                "the rest"
            )
        named = () if model is None else model.named_parameters()
        yield from [name for name, p in named if isinstance(p, DTensor)]

    def __reduce__(self) -> Any:
        return list, ()  # copies are for other models


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
    from transformers.distributed.configuration_utils import DistributedConfig

    class Sizes(DistributedConfig):  # type: ignore[misc]
        """Those of an unsharded model, but that of data parallelism, where FSDP is at work."""

        def __init__(self, model: weakref.ref[Any]) -> None:
            self._model = model
            super().__init__()

        @property
        def dp_size(self) -> int:
            model = self._model()
            return 1 if model is None or not _managed(model) else _groups(model)

        def __reduce__(self) -> Any:
            return DistributedConfig, ()  # copies are for other models

    return Sizes


def _managed(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _groups(model: nn.Module) -> int:
    """How many groups of ranks hold the model."""
    return dist.get_world_size() // _tp(model)


def _tp(model: nn.Module) -> int:
    """Over how many ranks it, or what is in it, is sharded; 1 where nothing is."""
    plans = (plan_of(module) for module in model.modules())
    return max((plan.tp for plan in plans if plan is not None), default=1)


def _teach(accelerate: Any) -> None:
    """Have every Accelerator take a sharded model as it is, and its tp group one batch."""
    kind = accelerate.Accelerator
    if not hasattr(kind, _TAUGHT):
        setattr(kind, _TAUGHT, True)
        _teach_accelerator(kind)
        _teach_metrics(kind, accelerate.utils.operations.recursively_apply)
        _teach_parallelism(accelerate.ParallelismConfig)


def _teach_accelerator(kind: Any) -> None:
    prepare, prepare_model = kind.prepare, kind.prepare_model
    prepare_data_loader, save_state = kind.prepare_data_loader, kind.save_state
    get_state_dict = kind.get_state_dict

    @functools.wraps(prepare)
    def models_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        # of which the loaders beside them learn what their batches are
        if not self.is_fsdp2:
            args = tuple(self.prepare_model(arg) if _is_sharded(arg) else arg for arg in args)
        return prepare(self, *args, **kwargs)

    @functools.wraps(prepare_model)
    def as_it_is(
        self: Any, model: Any, device_placement: Any = None, evaluation_mode: bool = False
    ) -> Any:
        # FSDP2 is applied by accelerate itself, where it was told how
        if not self.is_fsdp2 and _is_sharded(model):
            _tell(self, model, evaluation_mode)
            _draw_alike(self)
            evaluation_mode = True
        return prepare_model(self, model, device_placement, evaluation_mode)

    @functools.wraps(prepare_data_loader)
    def in_one_order(self: Any, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        _shuffle_alike(self, data_loader)
        return prepare_data_loader(self, data_loader, *args, **kwargs)

    @functools.wraps(save_state)
    def of_whole_models(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_fsdp2 and any(_is_sharded(model) for model in self._models):
            raise ValueError(
                "Accelerator.save_state would write one rank's part of the model and of its "
                "optimizer; write the model with tpplan.save_checkpoint, and the optimizer with "
                "torch.distributed.checkpoint"
            )
        return save_state(self, *args, **kwargs)

    @functools.wraps(get_state_dict)
    def whole(self: Any, model: Any, unwrap: bool = True) -> Any:
        state = get_state_dict(self, model, unwrap)
        return whole_state(state) if not self.is_fsdp2 and _is_sharded(model) else state

    kind.get_state_dict = whole
    kind.prepare, kind.prepare_model = models_first, as_it_is
    kind.prepare_data_loader, kind.save_state = in_one_order, of_whole_models


def _teach_metrics(kind: Any, apply: Any) -> None:
    """Have ``gather_for_metrics`` give every sample once: all ranks of a tp group have it.

    Args:
        apply: what accelerate maps a function over the tensors in a structure by.
    """
    for_metrics = kind.gather_for_metrics

    @functools.wraps(for_metrics)
    def once(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        tp = max((_tp(m) for m in self._models if isinstance(m, nn.Module)), default=1)
        if tp == 1 or self.num_processes % tp:
            return for_metrics(self, input_data, use_gather_object)

        def of_first_ranks(tensor: torch.Tensor) -> torch.Tensor:
            each = len(tensor) // self.num_processes
            everyones: torch.Tensor = tensor.unflatten(0, (self.num_processes, each))
            return everyones[::tp].flatten(0, 1)

        if use_gather_object or not _all_tensors(apply, input_data):
            mine = [] if self.process_index % tp else input_data
            return for_metrics(self, mine, use_gather_object=True)
        gather = self.gather
        self.gather = lambda data: apply(of_first_ranks, gather(data))
        try:
            return for_metrics(self, input_data)
        finally:
            del self.gather

    kind.gather_for_metrics = once


def _all_tensors(apply: Any, data: Any) -> bool:
    """As accelerate asks, which gathers as Python objects what is not."""
    try:
        apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _teach_parallelism(kind: Any) -> None:
    validate = kind._validate_accelerator

    @functools.wraps(validate)
    def on_cpus(self: Any, accelerator: Any) -> None:
        if self.tp_size > 1:
            _require_all_processes(accelerator)
            if self.total_size < accelerator.num_processes:
                raise _not_averaged(accelerator.num_processes // self.tp_size)
        # all it has against processes without GPUs is that none of its kinds is theirs
        on_cpu = accelerator.device.type == "cpu" and accelerator.num_processes > 1
        validate(self, _Several(accelerator) if on_cpu else accelerator)

    kind._validate_accelerator = on_cpus


def _require_all_processes(accelerator: Any) -> None:
    processes = dist.get_world_size() if dist.is_initialized() else 1
    if accelerator.num_processes == 1 < processes:
        raise ValueError(
            f"accelerate takes each of the {processes} processes for the only one, as it does "
            "where there is no GPU; give it Accelerator(cpu=True), or "
            "TrainingArguments(use_cpu=True)"
        )


class _Several:
    """An Accelerator, of several devices."""

    multi_device = True

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def _is_sharded(given: Any) -> bool:
    return isinstance(given, nn.Module) and _tp(given) > 1


def _tell(accelerator: Any, model: nn.Module, evaluation: bool) -> None:
    """Let an Accelerator know which ranks are to be given the same batches."""
    _require_all_processes(accelerator)
    copies = _groups(model)
    if copies > 1 and not evaluation and not _managed(model):
        raise _not_averaged(copies)
    if accelerator.state.device_mesh is None:  # it is asked for the batches alone
        sizes = copies, _tp(model)
        mesh = init_device_mesh(accelerator.device.type, sizes, mesh_dim_names=("dp_shard", "tp"))
        accelerator.state.device_mesh = mesh


def _draw_alike(accelerator: Any) -> None:
    """Have the ranks of each tp group go on from the place in the random sequence of its first.

    TRL's trainers that sample (GRPO, RLOO) give every process a seed of its own.
    """
    mesh = accelerator.state.device_mesh
    if "tp" not in (mesh.mesh_dim_names or ()):
        return
    group = mesh["tp"].get_group()
    kinds = [torch.random]
    if accelerator.device.type != "cpu":
        kinds.append(torch.get_device_module(accelerator.device))
    state = [kind.get_rng_state() for kind in kinds]
    dist.broadcast_object_list(state, group=group, group_src=0)
    for kind, first in zip(kinds, state, strict=True):
        if not torch.equal(kind.get_rng_state(), first):
            kind.set_rng_state(first)


def _not_averaged(copies: int) -> ValueError:
    return ValueError(
        f"{copies} tensor-parallel groups hold the model, and nothing averages their gradients: "
        'apply fully_shard(model, mesh=mesh["dp"]) before Accelerator.prepare and before Trainer'
    )


def _shuffle_alike(accelerator: Any, loader: Any) -> None:
    """Have the ranks of the one tp group there is draw one order of the data.

    accelerate sees to that where there are several groups. Where the ranks stand at one place of
    the random sequence, the order is that of an unsharded run, and is left.
    """
    mesh, sampler = accelerator.state.device_mesh, loader.sampler
    if mesh is None or mesh.mesh_dim_names[-1] != "tp":
        return
    if mesh["tp"].size() != accelerator.num_processes:
        return
    if not isinstance(sampler, RandomSampler) or sampler.generator is not None:
        return
    everybody: list[Any] = [None] * accelerator.num_processes
    dist.all_gather_object(everybody, (torch.get_rng_state(), torch.initial_seed()))
    first, seed = everybody[0]
    if not all(torch.equal(state, first) for state, _ in everybody):
        sampler.generator = torch.Generator().manual_seed(seed)
