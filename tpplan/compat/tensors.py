"""DTensors: their parts, their making, what torch does with them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._library.simple_registry import find_torch_dispatch_rule
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpplan.compat.modes import is_traced
from tpplan.compat.replaced import there
from tpplan.compat.sizes import larger

StridedShard = _StridedShard
"""What FSDP2 cut of what was cut along that dimension before."""


def local_of(tensor: DTensor) -> torch.Tensor:
    """The shard a DTensor holds on this rank, without autograd (``to_local()`` records a node)."""
    return tensor._local_tensor


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of which this one is a part, or itself."""
    return mesh._get_root_mesh()


def put_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Give a DTensor its shard, also where its class answers for ``_local_tensor`` itself."""
    there(DTensor, "_local_tensor").__set__(tensor, local)


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


def _settable_data() -> None:
    """Let ``parameter.data = value`` reach the shard; as torch has it, a DTensor keeps its own."""
    plain = vars(torch._C.TensorBase)["data"]

    def set_data(self: DTensor, value: torch.Tensor) -> None:
        if value.shape == self.shape:
            value = _placed_as(self, value.detach())
        plain.__set__(self, value)
        if isinstance(value, DTensor):
            self._local_tensor, self._spec = value._local_tensor, value._spec

    DTensor.data = property(plain.__get__, set_data)  # type: ignore[assignment, method-assign]


def _placed_as(x: DTensor, value: torch.Tensor) -> DTensor:
    """``value``, which is a DTensor or what every rank has, cut as ``x`` is."""
    mesh = x.device_mesh
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    elif value.device_mesh != mesh or value.placements == x.placements:
        return value
    return value.redistribute(mesh, x.placements)


def _find_anomalies() -> None:
    """Let anomaly mode look into gradients that are DTensors: torch knows no sharding of its op."""
    op = torch.ops.aten._is_any_true.default
    propagator = DTensor._op_dispatcher.sharding_propagator
    if op not in propagator.op_strategy_funcs:
        register_sharding(op)(lambda x: [([Replicate()], [Replicate()])])


def _left_alone(function: Any) -> None:
    """Keep TorchDynamo from looking at what torch's own code calls, as it does not at that."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(*skip))


_exported = there(DTensor, "__init__")
_GIVEN = "_tpplan_given"


def _quickly_made() -> None:
    """Let making a DTensor take half the time: torch's constructor is for export alone.

    Each gradient is made twice, by who computes it and by autograd, which detaches it.
    """

    def init(self: DTensor, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_exporting():
            _exported(self, *args, **kwargs)

    _left_alone(init)
    DTensor.__init__ = init  # type: ignore[method-assign]


def _quickly_detached() -> None:
    """Let ``detach`` of a DTensor take less time: autograd detaches each gradient that it keeps.

    As torch has it, it goes the way of all ops, whose sharding is looked up: 3 % of a small step.
    Of one from ``gradient_around`` what is inside is no part of a graph, and needs no other name.
    """
    op = torch.ops.aten.detach.default
    if find_torch_dispatch_rule(op, DTensor) is not None:
        return  # somebody else's
    make = torch.Tensor._dtensor__new__  # type: ignore[attr-defined]

    def detached(cls: Any, func: Any, types: Any, args: Any, kwargs: Any) -> DTensor:
        x: DTensor = args[0]
        local = x._local_tensor if _GIVEN in x.__dict__ else func(x._local_tensor)
        return make(DTensor, local, x._spec, requires_grad=False)  # type: ignore[no-any-return]

    _left_alone(detached)
    torch.library.register_torch_dispatch(op, DTensor, detached)


_PARAMETER = "_tpplan_parameter"


def as_parameter(tensor: DTensor) -> None:
    """Have copies of a parameter be without its gradient, as those of plain parameters are."""
    vars(tensor)[_PARAMETER] = True


def _copied_as_parameters() -> None:
    """torch copies a parameter that is a DTensor with its gradient, as any other tensor."""
    plain = DTensor.__deepcopy__

    def copied(self: DTensor, memo: dict[int, Any]) -> Any:
        if id(self) in memo or _PARAMETER not in vars(self) or not self.is_leaf:
            return plain(self, memo)
        twin = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    DTensor.__deepcopy__ = copied  # type: ignore[assignment, method-assign]


def _refuse_lost_writes() -> None:
    """Have writes raise that torch makes to a copy, and says nothing.

    Views across the cut dimension are of what it gathers for them.
    """
    tail = there(OpDispatcher, "_dispatch_fast_path_python_tail")

    @functools.wraps(tail)
    def watched(self: Any, op: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
        in_place, into_given = rest[-2:]
        if in_place or into_given:
            written = tree_leaves(args[0] if in_place else kwargs)
            if any(map(_is_of_a_copy, written)):
                raise RuntimeError(
                    f"{op} writes to a view of a DTensor across the dimension along which that is "
                    "sharded, which torch makes of a gathered copy, so the write would be lost: "
                    "write to the whole tensor (x.mul_(mask), x.copy_(values)) or to this rank's "
                    "part (x.to_local())"
                )
        return tail(self, op, args, kwargs, *rest)

    OpDispatcher._dispatch_fast_path_python_tail = watched  # type: ignore[assignment, method-assign]


def _is_of_a_copy(x: Any) -> bool:
    if not isinstance(x, DTensor) or not x._is_view() or is_traced():
        return False
    base = x._base
    return isinstance(base, DTensor) and _storage(base) != _storage(x)


def _storage(x: DTensor) -> int:
    return int(x._local_tensor.untyped_storage()._cdata)


_settable_data()
_refuse_lost_writes()
_find_anomalies()
_quickly_made()
_quickly_detached()
_copied_as_parameters()


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
        strides = [1] * bool(len(shape))
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * larger(size, 1))
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


def gradient_around(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around what an eager backward gives to a parameter; differentiable."""
    if local.requires_grad:
        return dtensor(local, spec)
    made: DTensor = torch.Tensor._dtensor__new__(DTensor, local, spec, requires_grad=False)  # type: ignore[attr-defined]
    made.__dict__[_GIVEN] = True
    return made


def unflattened(kind: type[DTensor], inner: Any, context: Any, size: Any, stride: Any) -> DTensor:
    """``__tensor_unflatten__`` of a DTensor's subclass: what torch builds, but of that class."""
    plain = DTensor.__tensor_unflatten__(inner, context, size, stride)
    return torch.Tensor._dtensor__new__(  # type: ignore[attr-defined, no-any-return]
        kind, plain._local_tensor, plain._spec, requires_grad=plain.requires_grad
    )


def tangents_of(
    kind: type[DTensor], take: Callable[[torch.Tensor, type[DTensor], Any], torch.Tensor | None]
) -> None:
    """Have compiled graphs take whole gradients of the tensors of a ``kind`` that they give.

    Where nothing reads such a result, autograd makes zeros for it that are a plain tensor, and
    torch raises (pytorch#172556).

    Args:
        take: of a whole gradient, and of the class and the context of what the graph gave: the
            gradient to be had; None where that cannot be known.
    """
    name = "__coerce_same_metadata_as_tangent__"
    there(DTensor, name)  # which torch asks for
    others = getattr(torch.Tensor, name, None)

    def coerced(self: torch.Tensor, context: Any, expected: type | None = None) -> Any:
        if expected is not None and issubclass(expected, kind):
            return take(self, expected, context)
        return None if others is None else others(self, context, expected)

    setattr(torch.Tensor, name, coerced)


def kept_by_fsdp(placement: type[Placement], kind: type[DTensor]) -> None:
    """Have FSDP2 build DTensors of which a placement is of class ``placement`` as ``kind``.

    It takes parameters and gradients apart and builds plain DTensors from their specs, which would
    have the placement, but not what goes with it.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    build = there(_fsdp_param, "_from_local_no_grad")
    if placement in getattr(build, "placements", ()):
        return

    def built(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
        if any(isinstance(where, placement) for where in spec.placements):
            return torch.Tensor._dtensor__new__(  # type: ignore[attr-defined, no-any-return]
                kind, local, spec, requires_grad=local.requires_grad
            )
        return build(local, spec)  # type: ignore[no-any-return]

    built.placements = (placement, *getattr(build, "placements", ()))  # type: ignore[attr-defined]
    vars(_fsdp_param)["_from_local_no_grad"] = built


def full_states_by(
    placement: type[Placement], place: Callable[[torch.Tensor, DTensorSpec], DTensor]
) -> None:
    """Have torch's functions for full state dicts ``place`` what is placed by ``placement``.

    They know torch's own placements: others they refuse, or take for tensors that are not cut.
    """
    from torch.distributed import _state_dict_utils as utils

    distribute = there(utils, "distribute_tensor")
    fill = there(utils, "_distribute_tensors")
    if placement in getattr(fill, "placements", ()):
        return

    def by_placement(placements: Sequence[Placement]) -> bool:
        return any(isinstance(where, placement) for where in placements)

    def distributed(
        tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
    ) -> DTensor:
        if by_placement(placements):
            return place(tensor, dtensor_spec(mesh, placements, tensor.shape, tensor.dtype))
        return distribute(tensor, mesh, placements)  # type: ignore[no-any-return]

    def filled(states: dict[str, Any], keys: list[str], *rest: Any) -> None:
        others = []
        for key in keys:
            state = states.get(key)  # of a DTensor, with the whole one
            if isinstance(state, tuple) and by_placement(state[0].placements):
                states[key] = place(state[1], spec_of(state[0]))
            else:
                others.append(key)
        fill(states, others, *rest)

    filled.placements = (placement, *getattr(fill, "placements", ()))  # type: ignore[attr-defined]
    vars(utils).update(distribute_tensor=distributed, _distribute_tensors=filled)
