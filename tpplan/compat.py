"""Every private or version-dependent torch API that tpplan uses, in one place.

Written against torch 2.13 and meant to work on 2.12 to 2.15: what a release moves or renames is
mended here and nowhere else.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NeedsValuesError = (DataDependentOutputException, DynamicOutputShapeException)
"""What an op raises whose result depends on values that fake tensors do not have."""

__all__ = [
    "DTensorSpec",
    "FakeTensor",
    "FakeTensorMode",
    "NeedsValuesError",
    "below_autograd",
    "differentiates_backward",
    "dispatch_is_observed",
    "dispatch_modes",
    "dtensor",
    "dtensor_spec",
    "fake_world",
    "fakes_are_made",
    "has_data",
    "hooks_of",
    "in_backward",
    "is_composite",
    "is_fake",
    "is_held_elsewhere",
    "is_traced",
    "is_view",
    "kept_by_fsdp",
    "local_of",
    "memory_of",
    "mesh_of",
    "queue_of",
    "quiet",
    "rehearsed_in",
    "run_when_ready",
    "running_node",
    "sequence_number",
    "set_hooks",
    "shards_of",
    "simulate",
    "spec_of",
    "tracer",
    "unflattened",
    "unfused",
    "unmoded",
    "unobserved",
    "without_fakes",
    "written_by",
]

_RUN_AT_ONCE = 2**62
# seconds without any work after which simulated ranks are taken to be stuck
_STUCK = 4.0
_C10D_TABLES = (
    "_pg_map",
    "_pg_names",
    "_pg_group_ranks",
    "_pg_backend_config",
    "_tags_to_pg",
    "_pg_to_tag",
    "_group_count",
)


def _there(owner: Any, name: str) -> Any:
    """The attribute of a module or class of torch's that is about to be replaced.

    Torch would not mind one more that it does not read, and nothing would say so.
    """
    if name not in vars(owner):
        raise RuntimeError(
            f"torch {torch.__version__} has no {owner.__name__}.{name}, which tpplan replaces: "
            "this version of tpplan is for torch 2.12 to 2.15"
        )
    return vars(owner)[name]


def local_of(tensor: DTensor) -> torch.Tensor:
    """The shard a DTensor holds on this rank, without autograd (``to_local()`` records a node)."""
    return tensor._local_tensor


class _Shards(TorchDispatchMode):
    """Within it, ``detach`` of a DTensor answers with its shard."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(args[0]._local_tensor)


def shards_of(tensors: Sequence[DTensor]) -> list[torch.Tensor]:
    """The shards of DTensors, outside autograd, each with the version counter of its DTensor.

    What is written to a DTensor bumps the counter of the DTensor alone. Autograd takes what
    ``detach`` returns for a view of what it was given, so it shares the counter with it: a
    parameter that is changed before its backward is noticed there.
    """
    if torch.compiler.is_compiling():
        return [t._local_tensor.view_as(t._local_tensor) for t in tensors]
    with torch.no_grad(), _Shards():
        return [torch.ops.aten.detach.default(t) for t in tensors]


def hooks_of(leaf: torch.Tensor) -> tuple[Any, Any]:
    """The tables of a leaf's hooks: on its gradient, and after that is accumulated."""
    return leaf._backward_hooks, leaf._post_accumulate_grad_hooks  # type: ignore[attr-defined]


def set_hooks(leaf: torch.Tensor, hooks: tuple[Any, Any]) -> None:
    """Give a leaf the hooks of another one, under the handles that users hold."""
    if hooks[0]:
        leaf._backward_hooks = hooks[0]
    if hooks[1]:
        leaf._post_accumulate_grad_hooks = hooks[1]  # type: ignore[attr-defined]


def memory_of(tensor: torch.Tensor) -> int:
    """A number that tensors have in common whose values lie in the same memory."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def unmoded() -> contextlib.AbstractContextManager[None]:
    """Within it, no mode sees torch's functions."""
    return torch._C.DisableTorchFunction()  # type: ignore[no-any-return]


def is_held_elsewhere(gradient: torch.Tensor) -> bool:
    """Whether autograd holds on to a gradient that it gave to a function."""
    return gradient._use_count() > 1  # type: ignore[attr-defined, no-any-return]


def _settable_data() -> None:
    """Let ``parameter.data = value`` reach the shard; as torch has it, a DTensor keeps its own."""
    plain = vars(torch._C.TensorBase)["data"]

    def set_data(self: DTensor, value: torch.Tensor) -> None:
        plain.__set__(self, value)
        if isinstance(value, DTensor):
            self._local_tensor, self._spec = value._local_tensor, value._spec

    DTensor.data = property(plain.__get__, set_data)  # type: ignore[assignment, method-assign]


def _find_anomalies() -> None:
    """Let anomaly mode look into gradients that are DTensors: torch knows no sharding of its op."""
    op = torch.ops.aten._is_any_true.default
    propagator = DTensor._op_dispatcher.sharding_propagator
    if op not in propagator.op_strategy_funcs:
        register_sharding(op)(lambda x: [([Replicate()], [Replicate()])])


_settable_data()
_find_anomalies()


def spec_of(tensor: DTensor) -> DTensorSpec:
    """The mesh, placements and global metadata of a DTensor."""
    return tensor._spec


def mesh_of(tensor: DTensor) -> DeviceMesh:
    """The mesh of a DTensor."""
    return tensor._spec.mesh


def dtensor_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    dtype: torch.dtype,
    stride: Sequence[int] | None = None,
) -> DTensorSpec:
    """The spec of a global tensor of ``shape``, contiguous unless its ``stride`` is given.

    It costs 10 µs, so callers keep it.
    """
    if stride is None:
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * max(int(size), 1))
        stride = strides[::-1]
    meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def dtensor(local: torch.Tensor, spec: DTensorSpec, kind: type[DTensor] = DTensor) -> DTensor:
    """A DTensor around ``local`` outside autograd: for gradients and inside autograd functions.

    The constructor cannot be traced by torch.compile, nor differentiated; ``from_local`` can.
    """
    whole = torch.compiler.is_compiling() or (torch.is_grad_enabled() and local.requires_grad)
    if whole and kind is DTensor:
        assert spec.tensor_meta is not None
        return DTensor.from_local(
            local,
            spec.mesh,
            spec.placements,
            run_check=False,
            shape=spec.tensor_meta.shape,
            stride=spec.tensor_meta.stride,
        )
    if local.requires_grad:
        local = local.detach()
    # what DTensor.__new__ is: DTensor.__init__ does nothing, for more than half of the time
    return torch.Tensor._dtensor__new__(kind, local, spec, requires_grad=False)  # type: ignore[attr-defined, no-any-return]


def unflattened(kind: type[DTensor], inner: Any, context: Any, size: Any, stride: Any) -> DTensor:
    """``__tensor_unflatten__`` of a DTensor's subclass: what torch builds, but of that class."""
    plain = DTensor.__tensor_unflatten__(inner, context, size, stride)
    return torch.Tensor._dtensor__new__(  # type: ignore[attr-defined, no-any-return]
        kind, plain._local_tensor, plain._spec, requires_grad=plain.requires_grad
    )


def kept_by_fsdp(placement: type[Placement], kind: type[DTensor]) -> None:
    """Have FSDP2 build DTensors whose last placement is of class ``placement`` as ``kind``.

    It takes parameters and gradients apart and builds plain DTensors from their specs, which would
    have the placement, but not what goes with it.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    build = _there(_fsdp_param, "_from_local_no_grad")
    if placement in getattr(build, "placements", ()):
        return

    def built(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
        if isinstance(spec.placements[-1], placement):
            return torch.Tensor._dtensor__new__(  # type: ignore[attr-defined, no-any-return]
                kind, local, spec, requires_grad=local.requires_grad
            )
        return build(local, spec)  # type: ignore[no-any-return]

    built.placements = (placement, *getattr(build, "placements", ()))  # type: ignore[attr-defined]
    vars(_fsdp_param)["_from_local_no_grad"] = built


def fakes_are_made() -> bool:
    """Whether ops make fake tensors now: nothing is computed, and nothing sent."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None  # type: ignore[attr-defined]


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fake, or a DTensor or another wrapper of fakes."""
    from torch._subclasses import fake_tensor

    return fake_tensor.is_fake(tensor)


def tracer(sharded: bool) -> str | None:
    """Who records this forward in a form that holds no collectives, or no ``sharded`` tensors."""
    if torch.fx._symbolic_trace.is_fx_symbolic_tracing():
        return "torch.fx"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit"
    exports = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    return "torch.export without strict=True" if sharded and exports else None


def is_traced() -> bool:
    """Whether torch.compile traces now; what ops write in place, it makes functions of."""
    return torch._guards.TracingContext.try_get() is not None


def without_fakes() -> contextlib.AbstractContextManager[object]:
    """Within it, ops compute, although a fake mode is active."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


@contextlib.contextmanager
def rehearsed_in(context: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """Within it, DTensor tries ops on fake tensors, to know their results' sizes, in ``context``.

    It holds a lock while it does so, which is nothing unless ranks are threads.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    outer = _there(ShardingPropagator, "_fake_mode_lock")
    ShardingPropagator._fake_mode_lock = context  # type: ignore[assignment]
    try:
        yield
    finally:
        ShardingPropagator._fake_mode_lock = outer


# called for every op and collective: not wrapped
dispatch_is_observed: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Whether a mode is to see, or to replace, the ops that are called (how many)."""


def dispatch_modes() -> list[Any]:
    """The modes that are to see the ops that are called, the outermost first."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return _get_current_dispatch_mode_stack()


def unobserved() -> contextlib.AbstractContextManager[object]:
    """Within it, no mode sees the ops that are called: they are no part of the computation."""
    if not dispatch_is_observed():
        return contextlib.nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def is_composite(func: Any) -> bool:
    """Whether an op consists of others, which autograd sees in its place."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")  # type: ignore[no-any-return]


def is_view(func: Any) -> bool:
    """Whether what an op returns shares the storage of what it was given."""
    kinds = [r.alias_info for r in func._schema.returns]
    return any(kind is not None and not kind.is_write for kind in kinds)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors that an op writes to."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            found += tree_leaves(given)
    return found


def has_data(x: torch.Tensor) -> bool:
    """Whether ``x`` is values in memory; meta tensors, and those inside of vmap, are not."""
    return not x.is_meta and torch._C._has_storage(x)


def below_autograd() -> contextlib.AbstractContextManager[object]:
    """Within it, ops skip their autograd registrations; for code inside autograd functions.

    The functional collectives have theirs in Python, which costs more than the call itself. Not for
    code that is being compiled.
    """
    return torch._C._AutoDispatchBelowAutograd()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging the traceback of an error on fake tensors that is raised as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def unfused() -> Iterator[None]:
    """Without the fused attention layers of ``torch.nn``, which do not call their submodules."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def queue_of(device_type: str) -> int | None:
    """The number of the current queue of a device (a CUDA stream); None where there is only one."""
    if device_type == "cpu":
        return None
    return int(torch.get_device_module(device_type).current_stream().stream_id)


def in_backward() -> bool:
    """Whether this thread is inside autograd's backward (activation checkpointing recomputes)."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1


def sequence_number() -> int:
    """The number that the next autograd node this thread records will have."""
    return torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined, no-any-return]


def running_node() -> int | None:
    """The number of the autograd node whose backward runs in this thread, None outside backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def differentiates_backward() -> bool:
    """Whether the backward that is running is itself recorded (``create_graph=True``)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def run_when_ready(node: Any) -> None:
    """Let autograd run ``node`` as soon as its gradients are complete.

    The engine orders ready nodes by creation, latest first; a node kept over several forwards
    would wait for the end of the backward pass and hold every gradient until then.
    """
    node._set_sequence_nr(_RUN_AT_ONCE)


def _join(
    threads: Sequence[threading.Thread],
    failures: list[BaseException],
    stop: Callable[[BaseException], None],
) -> None:
    """Wait for ``threads``, unless all that are left wait for each other: no work is done."""
    worked, since = time.process_time(), time.monotonic()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.25)
            if time.process_time() - worked > 0.02:
                worked, since = time.process_time(), time.monotonic()
            elif time.monotonic() - since > _STUCK and not failures:
                error = RuntimeError("the ranks wait for each other in different collectives")
                failures.append(error)
                stop(error)


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[DeviceMesh]:
    """A process group of ``size`` ranks in which nothing is sent, and its 1-D mesh.

    A live process group is set aside for the duration and put back afterwards, so that a dry run
    can be asked for in the middle of a real run.
    """
    import torch.distributed.distributed_c10d as c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    default = c10d._world.default_pg
    names = dict(c10d._world.pg_names)
    tables = {key: _there(c10d, key) for key in _C10D_TABLES}
    for key, value in tables.items():
        setattr(c10d, key, type(value)())
    for name in names.values():
        torch._C._distributed_c10d._unregister_process_group(name)
    c10d._update_default_pg(None)
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            # DTensor's caches go by mesh equality: a name no real mesh has keeps them apart
            yield init_device_mesh("cpu", (size,), mesh_dim_names=("dry run",))
        finally:
            dist.destroy_process_group()
    finally:
        for key, value in tables.items():
            setattr(c10d, key, value)
        c10d._update_default_pg(default)
        for group, name in names.items():
            torch._C._distributed_c10d._register_process_group(name, group)


def simulate(size: int, job: Callable[[DeviceMesh], Any]) -> list[Any]:
    """``job(mesh)`` on ``size`` ranks that are threads of this process; what each returned.

    Every rank runs the very code a process would, its Python branches included; collectives meet
    in memory. The first exception of a rank is raised here.

    Raises:
        RuntimeError: where all of them wait, because they issue different collectives.
    """
    import torch.distributed.distributed_c10d as c10d
    from torch.testing._internal.distributed.multi_threaded_pg import (
        ProcessLocalGroup,
        _install_threaded_pg,
        _uninstall_threaded_pg,
    )

    results: list[Any] = [None] * size
    failures: list[BaseException] = []
    store = dist.HashStore()  # type: ignore[attr-defined]

    def run(rank: int) -> None:
        try:
            c10d.init_process_group("threaded", rank=rank, world_size=size, store=store)
            mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
            results[rank] = job(mesh)
        except BaseException as error:
            failures.append(error)
            ProcessLocalGroup.exception_handle(error)
        finally:
            if c10d.is_initialized():
                c10d.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    _install_threaded_pg()
    try:
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        _join(threads, failures, ProcessLocalGroup.exception_handle)
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
    if failures:
        raise failures[0]
    return results
