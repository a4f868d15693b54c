"""Whether the models of all ranks compute the same: each runs its own, unsharded, on one batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh

from tpplan.comm.alike import PROCESS
from tpplan.comm.fingerprints import are_apart, projections
from tpplan.observe.untouched import by_itself
from tpplan.proof.exact import exact
from tpplan.proof.locate import Seen, watched
from tpplan.proof.miniature import unsharded
from tpplan.proof.scenes import Staged
from tpplan.proof.step import ROUNDING, Result, step
from tpplan.rewrite.launch import everyones, named

Numbers = Mapping[str, list[float]]
"""What is compared, by name: its ``projections``."""


def require_alike(staged: Staged | None, failed: Exception | None, mesh: DeviceMesh) -> None:
    """Compare what the unsharded model gives on each rank; one small exchange, or two.

    Args:
        staged: on this rank; None where it ``failed``.

    Raises:
        ValueError: on all ranks, where it fails on some of them, or gives something else.
    """
    numbers: Numbers = {}
    try:
        numbers = dict(_numbers(staged)) if staged else {}
    except Exception as error:
        failed = failed or error
    told = None if failed is None else f"{type(failed).__name__}: {failed}"
    everyone = everyones((told, numbers), mesh)
    for rank, (said, _) in enumerate(everyone):
        if said is not None:
            raise ValueError(f"{named(rank, mesh)} stopped with {said}") from failed
    rank, what = _first_apart([numbers for _, numbers in everyone])
    if what is None or staged is None:
        return
    _, seen = _first_apart(everyones(_watched(staged), mesh))
    module = (seen or "").partition(" ")[2] or "the model"
    raise ValueError(
        f"{named(rank, mesh)} has a model that computes something else than rank 0's, with the "
        f"same parameters and inputs: {module} differs first ({what}): {PROCESS}"
    )


def _numbers(staged: Staged) -> Iterator[tuple[str, list[float]]]:
    """What each step gives, and the gradients of all parameters together."""
    for number, (scene, results) in enumerate(zip(staged.scenes, staged.expected, strict=True)):
        for place, result in enumerate(results):
            prefix = f"step {number}, {scene.what}" + f", place {place}" * (len(results) > 1)
            for name, out in result.outputs.items():
                yield f"{prefix}: {name}", projections(out).tolist()
            yield f"{prefix}: the gradients", _of_all(result)


def _of_all(result: Result) -> list[float]:
    gradients = [projections(g) for g in result.gradients.values() if g is not None]
    return torch.stack(gradients).sum(0).tolist() if gradients else []  # type: ignore[no-any-return]


def _watched(staged: Staged) -> Numbers:
    """What each module gave, in order, by a number and its path."""

    def run(model: torch.nn.Module) -> None:
        for seed, scene in enumerate(staged.scenes):
            step(model, scene, seed)

    seen: list[Seen] = []
    # the model itself is named where it fails with hooks
    with contextlib.suppress(Exception), exact(), by_itself(packages=True):
        seen = watched(unsharded(staged.small), staged.plan, run)
    return {f"{i} {s.path}": projections(s.tensor).tolist() for i, s in enumerate(seen)}


def _first_apart(everyone: list[Numbers]) -> tuple[int, str | None]:
    """The first rank that has something else than rank 0, and what; None where none has."""
    for rank, numbers in enumerate(everyone):
        names = [*everyone[0], *(name for name in numbers if name not in everyone[0])]
        for name in names:
            mine, first = numbers.get(name), everyone[0].get(name)
            if mine is None or first is None or len(mine) != len(first):
                return rank, name
            if mine and are_apart(torch.tensor([first, mine], dtype=torch.float64), ROUNDING).any():
                return rank, name
    return 0, None
