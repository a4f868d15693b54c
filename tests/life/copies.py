"""Events of the objects: copies, states, replaced parameters and modules, compilation, FSDP2."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, vjp
from torch.nn.utils import parametrizations, parametrize

from tests.compare import (
    Errors,
    compare_gradients,
    compare_parameters,
    error,
    full,
    gradient_errors,
    same,
)
from tests.life.blocks import BLOCKS, built
from tests.life.life import Life, forward, named, plainly

# --- copies and states


def copied(life: Life, used: bool) -> None:
    """A deep copy lives a life of its own."""
    if used:
        life.step("before")
        life.update("before")
        life.step("once more before")
    twin = life.twin()
    life.step("original")
    life.update("original")
    twin.step("copy", (3, 7), clear=False)  # which begins without gradients
    twin.update("copy")
    interleaved(life, twin)
    life.step("original afterwards", (3, 7))
    twin.step("copy afterwards")


def interleaved(*lives: Life) -> None:
    """Forward of the one and the other, then backward of both, the first one first."""
    calls = [life.inputs(2, 7) for life in lives]
    for side in (0, 1):
        objectives = []
        for life, call in zip(lives, calls, strict=True):
            model = life.both[side]
            model.zero_grad()
            objectives.append(forward(model, *call, plainly)[1])
        for objective in objectives:
            objective.backward()
    for index, life in enumerate(lives):
        life.found.add(f"interleaved {index}", compare_gradients(*life.both))


def pickled(life: Life) -> None:
    """Pickled and read back."""
    life.step("before")
    buffer = io.BytesIO()
    pickle.dump(life.model, buffer)
    buffer.seek(0)
    life.model = pickle.load(buffer)
    life.step("read back")


def states(life: Life) -> None:
    """State dicts out of the sharded model, and into it: whole ones, DTensors, assigned."""
    life.step("before")
    life.update("before")
    state = {name: full(t) for name, t in life.model.state_dict().items()}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    errors: Errors = {n: error(t, state[n]) for n, t in life.reference.state_dict().items()}
    life.found.add("state", errors)
    built(life.block).to(life.dtype).load_state_dict(torch.load(buffer))
    for index, assign in enumerate((False, True)):
        other = life.sibling(11 + index)
        whole = other.reference.state_dict()
        life.reference.load_state_dict(_cloned(whole), assign=assign)  # unties what is tied
        life.model.load_state_dict(_cloned(whole), assign=assign)
        life.found.add(f"loaded {assign}: values", compare_parameters(*life.both))
        life.step(f"loaded whole, assign={assign}")
        other = life.sibling(21 + index)
        life.reference.load_state_dict(_cloned(other.reference.state_dict()), assign=assign)
        life.model.load_state_dict(_cloned(other.model.state_dict()), assign=assign)
        life.step(f"loaded shards, assign={assign}")
        life.update(f"loaded shards, assign={assign}")


def _cloned(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in state.items()}


# --- other parameters

Made = Callable[[torch.Tensor], torch.Tensor]


def _each_replaced(life: Life, ours: Made) -> None:
    """Every parameter is replaced in turn; what refuses its replacement is given its own back."""
    life.step("before")
    refused = None
    for path, theirs, mine in life.pairs(*(p for p, _ in life.reference.named_modules())):
        for name, parameter in list(theirs._parameters.items()):
            if parameter is None:
                continue
            kept = parameter, mine._parameters[name]
            assert kept[1] is not None
            setattr(theirs, name, nn.Parameter(parameter.detach() * 1.5))
            try:
                setattr(mine, name, nn.Parameter(ours(kept[1].detach()) * 1.5))
                life.step(f"{path}.{name} replaced")
            except (RuntimeError, ValueError, TypeError) as e:
                refused = refused or e
                setattr(theirs, name, kept[0])
                mine._parameters[name] = kept[1]
                life.step(f"{path}.{name} given back")
    if refused is not None:
        raise refused


def replaced(life: Life) -> None:
    """Parameters replaced by other DTensors."""
    _each_replaced(life, lambda t: t)


def replaced_by_plain(life: Life) -> None:
    """Parameters replaced by whole plain tensors."""
    _each_replaced(life, full)


def called_with(life: Life) -> None:
    """``functional_call`` with DTensors that depend on the parameters."""
    life.step("before")

    def way(model: Any, *args: Any, **kwargs: Any) -> Any:
        doubled = {name: p * 2 for name, p in model.named_parameters()}
        return functional_call(model, doubled, args, kwargs)

    life.step("functional_call", way=way)
    life.step("afterwards")


def called_with_plain(life: Life) -> None:
    """``functional_call`` with whole plain tensors."""
    life.step("before")

    def way(model: Any, *args: Any, **kwargs: Any) -> Any:
        doubled = {name: (full(p) * 2).requires_grad_() for name, p in model.named_parameters()}
        return functional_call(model, doubled, args, kwargs)

    life.step("functional_call", way=way)
    life.step("afterwards")


def parametrized(life: Life) -> None:
    """A parametrization on a sharded weight."""
    life.step("before")
    for path, theirs, mine in _with_matrices(life):
        for module in (theirs, mine):
            parametrize.register_parametrization(module, "weight", Doubled())
        life.step(f"{path} parametrized")


class Doubled(nn.Module):
    """Twice the parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def weight_normed(life: Life) -> None:
    """Weight normalisation of a sharded weight, or the word that its norms are sums of parts."""
    life.step("before")
    for path, theirs, mine in _with_matrices(life):
        for module in (theirs, mine):
            parametrizations.weight_norm(module)
        try:
            life.step(f"{path} normalised")
        except RuntimeError as e:
            life.found.add(f"{path}: {e}", same("is a partial sum" in str(e)))
            return


def _with_matrices(life: Life) -> Any:
    paths = [
        path
        for path, module in life.reference.get_submodule("layers.0").named_modules(
            prefix="layers.0"
        )
        if getattr(module, "weight", None) is not None and module.weight.dim() == 2
    ]
    return life.pairs(*paths)


def traced(life: Life) -> None:
    """``torch.fx``, which records no collectives: whatever it trips over, it is not silent."""
    life.step("before")
    said = ""
    try:
        torch.fx.symbolic_trace(life.model, {"labels": None} if life.tokens else None)
    except RuntimeError as e:
        said = str(e)
    life.found.add("says why", same("torch.fx records no collectives" in said))
    life.step("afterwards")


def transformed(life: Life) -> None:
    """``torch.func``, which goes through no collective: refused, and nothing is left behind."""
    life.step("before")
    args, kwargs = life.inputs()
    parameters = dict(life.model.named_parameters())

    def call(given: dict[str, torch.Tensor]) -> torch.Tensor:
        out = functional_call(life.model, given, args, kwargs)
        return next(iter(named(out).values())).sum()

    for transform in (lambda: torch.func.grad(call)(parameters), lambda: vjp(call, parameters)):
        life.found.add("says why", same("torch.func's transforms" in _said(transform)))
    out, trained = call(parameters), list(parameters.values())
    seeds = torch.eye(2, dtype=out.dtype)[0]

    def back(seed: torch.Tensor, **how: bool) -> Any:
        return torch.autograd.grad(out, trained, seed, True, allow_unused=True, **how)

    # of a forward outside of any transform; code of the model's own may be what cannot
    for batched in (
        lambda: back(seeds, is_grads_batched=True),
        lambda: torch.func.vmap(back)(seeds),
    ):
        life.found.add("not silent", same(bool(_said(batched))))
    life.step("afterwards")


def _said(run: Callable[[], Any]) -> str:
    """The error that ``run`` raises."""
    try:
        run()
    except RuntimeError as e:
        return str(e)
    return ""


# --- compiled


def compiled_whole(life: Life) -> None:
    """``torch.compile`` of the model."""
    torch._dynamo.reset()
    whole = torch.compile(life.model, backend="aot_eager", fullgraph=True)

    def way(model: Any, *args: Any, **kwargs: Any) -> Any:
        return (whole if model is life.model else model)(*args, **kwargs)

    life.step("compiled", way=way)
    life.step("not compiled")


def compiled_layers(life: Life) -> None:
    """``torch.compile`` of every layer."""
    torch._dynamo.reset()
    life.step("before")
    for layer in life.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    life.step("compiled")
    life.update("compiled")
    life.step("compiled again")


# --- others in the same process


def two_models(life: Life) -> None:
    """Two models of other plans, in turn and at once."""
    roles = list(BLOCKS)
    other = life.sibling(5, roles[(roles.index(life.role) + 1) % len(roles)])
    same_role = life.sibling(6)
    for turn in ("first", "second"):
        for each in (life, other, same_role):
            each.step(turn, (2, 7))
            each.update(turn)
    interleaved(life, other, same_role)


@functools.cache
def world_mesh() -> DeviceMesh:
    """All four ranks as two groups of two, in another grid than the tests' own."""
    return DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))


def two_groups(life: Life) -> None:
    """Two tp groups with other inputs, and a second model over other groups of the same ranks."""
    mesh = world_mesh()
    other = life.sibling(5, mesh=mesh["tp"])
    third = life.sibling(6, mesh=mesh["dp"])
    for each in (life, other, third):
        each.apart()
    for turn in ("first", "second"):
        for each in (life, other, third):
            each.step(turn, (2, 7))
            each.update(turn)
    interleaved(life, other, third)


# --- FSDP2


def fsdp(life: Life, mesh: DeviceMesh) -> None:
    """``fully_shard`` after a first step; each half of the ranks has its own batch."""
    life.step("before")
    for layer in life.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(life.model, mesh=mesh["dp"])
    for turn in ("first", "second"):
        _data_parallel_step(life, mesh, turn)
    other = life.sibling(7)
    state = other.reference.state_dict()
    life.reference.load_state_dict(state)
    life.model.load_state_dict(_cloned(state))
    _data_parallel_step(life, mesh, "loaded")


def fsdp_accumulated(life: Life, mesh: DeviceMesh) -> None:
    """``fully_shard`` first of all, kept whole after the forward; batches between two sums."""
    for layer in life.model.layers:
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
    whole = fully_shard(life.model, mesh=mesh["dp"])
    parts, own = mesh["dp"].size(), mesh.get_local_rank("dp")
    for model in life.both:
        model.zero_grad()
    for turn in (0, 1, 2):
        calls = [life.inputs(2, 7 + turn) for _ in range(parts)]
        for call in calls:
            (forward(life.reference, *call, plainly)[1] / parts).backward()
        whole.set_requires_gradient_sync(turn == 2)
        forward(life.model, *calls[own], plainly)[1].backward()
    _compare_parts(life, "of three batches")
    _data_parallel_step(life, mesh, "afterwards")


def fsdp_compiled(life: Life, mesh: DeviceMesh) -> None:
    """Every layer is compiled, then ``fully_shard``: the order of torchtitan; other lengths."""
    torch._dynamo.reset()
    for layer in life.model.layers:
        layer.compile(backend="eager")
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(life.model, mesh=mesh["dp"])
    for shape in ((2, 8), (3, 7), (1, 5)):
        _data_parallel_step(life, mesh, f"{shape}", shape)


def _compare_parts(life: Life, name: str) -> None:
    grads = [
        {n: None if p.grad is None else full(p.grad) for n, p in m.named_parameters()}
        for m in life.both
    ]
    life.found.add(name, gradient_errors(*grads))


def _data_parallel_step(
    life: Life, mesh: DeviceMesh, name: str, shape: tuple[int, int] = (2, 7)
) -> None:
    parts, own = mesh["dp"].size(), mesh.get_local_rank("dp")
    calls = [life.inputs(*shape) for _ in range(parts)]
    for model in life.both:
        model.zero_grad()
    expected = []
    for call in calls:
        outputs, objective, _ = forward(life.reference, *call, plainly)
        (objective / parts).backward()
        expected.append(outputs)
    outputs, objective, _ = forward(life.model, *calls[own], plainly)
    objective.backward()
    life.compare(f"{name}: output", expected[own], outputs)
    _compare_parts(life, name)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-3) for m in life.both]
    for optimizer in optimizers:
        optimizer.step()
    for parameter_name, parameter in life.model.named_parameters():
        theirs = life.reference.get_parameter(parameter_name)
        life.found.add(f"{name}: {parameter_name}", error(theirs, full(parameter)))
