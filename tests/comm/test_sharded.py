"""Sharded tensors compute as if they were whole: outputs, gradients, gradients of gradients."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

from tests.comm.operators import FUNCTIONS, Beside, Function
from tests.compare import WRONG, Errors, Findings, beyond, error, gradient_errors
from tests.ranks import Ranks
from tpplan.comm import Site, Stream, Transition, join, split
from tpplan.roles.logits import Origin
from tpplan.simulate import Recorder

Wrap = Callable[[torch.Tensor], torch.Tensor]
SIZES = {"even": 8, "uneven": 7, "one": 1}


def stream_of(mesh: DeviceMesh) -> Stream:
    """A stream of (batch, sequence, width)."""
    return Stream(mesh, sequence_parallel=True, dim=1)


def as_stream(mesh: DeviceMesh, length: int) -> tuple[Wrap, tuple[int, ...], int]:
    """How rows become the stream in its global form, its shape and its sharded dimension."""
    stream = stream_of(mesh)
    return lambda rows: stream.to_global(rows, length), (2, length, 6), 1


def as_logits(mesh: DeviceMesh, classes: int) -> tuple[Wrap, tuple[int, ...], int]:
    """The same of logits."""
    stream, site = stream_of(mesh), Site("head", "logits")
    head = Transition(stream.group, site, site)
    return lambda rows: Origin(stream, head, classes, "shard").wrap(rows), (2, 5, classes), 2


ONCE = {"along: group_norm"}  # its second derivative changes the shape of a tensor in place
KINDS = {"stream": as_stream, "logits": as_logits}


def same(t: torch.Tensor) -> torch.Tensor:
    """What is whole already."""
    return t


def handed_out_job(mesh: DeviceMesh, kind: str, size: int) -> Errors:
    wrap, shape, dim = KINDS[kind](mesh, size)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    rows = split(whole, dim, stream_of(mesh).source.transition)
    x = wrap(rows.requires_grad_())
    with pytest.raises(RuntimeError, match="requires grad"):
        x.numpy()
    taken = x.detach().cpu()
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False).detach()
    arrays = {
        "saved": loaded.full_tensor(),
        "numpy": taken.numpy(),
        "asarray": np.asarray(taken),
        "tolist": taken.tolist(),
    }
    return {name: error(whole, torch.as_tensor(array)) for name, array in arrays.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_handed_out(ranks: Ranks, kind: str) -> None:
    """To a file, to numpy and to Python, as metrics take them."""
    for found in ranks.run(2, handed_out_job, kind, 7):
        assert not any(found.values()), found


def objective(outputs: list[torch.Tensor]) -> torch.Tensor:
    """All outputs, every element with a weight of its own."""
    generator = torch.Generator().manual_seed(11)
    total = torch.zeros((), dtype=torch.float64)
    for t in outputs:
        if t.requires_grad:
            weights = torch.randn(t.shape, generator=generator, dtype=torch.float64)
            t = t.full_tensor() if isinstance(t, DTensor) else t
            total = total + (t * weights).nan_to_num().sum()
    return total


def differentiated(
    function: Function, x: torch.Tensor, rows: torch.Tensor, beside: Beside, again: Wrap | None
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """What a function gives, and its derivatives.

    ``again``: makes a whole gradient of that of ``rows``, for derivatives of it.
    """
    outputs = [t for t in tree_leaves(function(x, beside)) if isinstance(t, torch.Tensor)]
    loss = objective(outputs)
    inputs = {"x": rows, **beside.trained()}
    found: dict[str, torch.Tensor] = {}
    if loss.requires_grad:
        first = torch.autograd.grad(
            loss, list(inputs.values()), create_graph=again is not None, materialize_grads=True
        )
        slopes = [] if again is None else [again(first[0]), *first[1:]]
        penalties = [objective([g.sin()]) for g in slopes if g.requires_grad]
        found = {name: g.detach() for name, g in zip(inputs, first, strict=True)}
        if penalties:
            second = torch.autograd.grad(
                torch.stack(penalties).sum(), list(inputs.values()), materialize_grads=True
            )
            found |= {f"{n} again": g for n, g in zip(inputs, second, strict=True)}
    full = [t.full_tensor() if isinstance(t, DTensor) else t for t in outputs]
    return [t.detach() for t in full], found


def compared(
    function: Function,
    wrap: Wrap,
    shape: tuple[int, ...],
    dim: int,
    mesh: DeviceMesh,
    again: bool = False,
) -> Errors:
    """The errors of what a function gives on the ranks, and of its gradients."""
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    transition = stream_of(mesh).source.transition

    def joined(t: torch.Tensor) -> torch.Tensor:
        return join(t, dim, shape[dim], transition)

    def rows_of(t: torch.Tensor) -> torch.Tensor:
        return split(t, dim, transition)

    rows = rows_of(whole.detach()).requires_grad_()
    try:
        expected, slopes = differentiated(
            function, whole * 1.0, whole, Beside(shape), same if again else None
        )
    except (RuntimeError, IndexError, ValueError) as refused:  # of so few rows
        try:
            differentiated(
                function, wrap(rows * 1.0), rows, Beside(shape), joined if again else None
            )
        except type(refused):
            return {}
        return {"accepts what fails whole": WRONG}
    got, ours = differentiated(
        function, wrap(rows * 1.0), rows, Beside(shape), joined if again else None
    )
    if len(expected) != len(got) or slopes.keys() != ours.keys():
        return {f"{len(got)} outputs, {list(ours)}, not {len(expected)}, {list(slopes)}": WRONG}
    errors = {
        f"output {i}": error(a.nan_to_num().double(), b.nan_to_num().double())
        for i, (a, b) in enumerate(zip(expected, got, strict=True))
    }
    kinds = [(a.dtype, a.shape) == (b.dtype, b.shape) for a, b in zip(expected, got, strict=True)]
    errors["shapes and dtypes"] = 0.0 if all(kinds) else WRONG
    ours = {n: g.nan_to_num() for n, g in ours.items()}
    slopes = {n: g.nan_to_num() for n, g in slopes.items()}
    cut = {n: rows_of(g) if n.startswith("x") else g for n, g in slopes.items()}
    return errors | {f"gradient of {n}": e for n, e in gradient_errors(cut, ours).items()}


def functions_job(mesh: DeviceMesh, kind: str, size: int) -> Errors:
    """Every function, on the ranks and whole; derivatives twice where shards are uneven."""
    found = Findings()
    for name, function in FUNCTIONS.items():
        with found.case(name):
            again = size == SIZES["uneven"] and name not in ONCE
            found.add(name, compared(function, *KINDS[kind](mesh, size), mesh, again))
    return found.errors


@pytest.mark.turns(24)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_functions(ranks: Ranks, kind: str, size: int) -> None:
    assert not beyond(ranks.run(2, functions_job, kind, size), 1e-10)


def torchs_own_job(mesh: DeviceMesh, length: int) -> Errors:
    """torch's own DTensors of the same rows go in and come back as gradients; nothing is sent."""
    found = Findings()
    stream, generator = stream_of(mesh), torch.Generator().manual_seed(3)
    values, slope = torch.randn(2, 2, length, 6, generator=generator, dtype=torch.float64)
    whole = values.clone().requires_grad_()
    given = distribute_tensor(values, mesh, [Shard(1)]).requires_grad_()
    gradient = distribute_tensor(slope, mesh, [Shard(1)])
    for order in (1, 2):
        with Recorder() as recorder:
            out = stream.to_global(stream.to_local(given).sin(), length)
            (ours,) = torch.autograd.grad(out, given, gradient, create_graph=order > 1)
        (due,) = torch.autograd.grad(whole.sin(), whole, slope, create_graph=order > 1)
        found.add(f"{order}: sends nothing", 0.0 if not recorder.collectives else WRONG)
        found.add(f"{order}: torch's own", 0.0 if type(ours) is DTensor else WRONG)
        if order > 1:
            (ours,) = torch.autograd.grad(ours.full_tensor().pow(3).sum(), given)
            (due,) = torch.autograd.grad(due.pow(3).sum(), whole)
        found.add(f"gradient of order {order}", error(due, ours.full_tensor().detach()))
    return found.errors


@pytest.mark.parametrize("length", SIZES.values(), ids=SIZES)
def test_torchs_own(ranks: Ranks, length: int) -> None:
    assert not beyond(ranks.run(2, torchs_own_job, length), 1e-10)
