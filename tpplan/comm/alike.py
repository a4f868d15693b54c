"""What the ranks of a group hold alike during a call, compared at its end.

Each rank runs the model's own code. What that reads of its process (numbers that a module keeps,
Python's random sequence, a clock) may be another number on each rank; then the ranks share out, and
sum, parts of several models.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from tpplan import compat
from tpplan.comm.agreement import ONE_ORDER, apart_in, first_other
from tpplan.comm.collectives import Group, Site, all_gather
from tpplan.comm.fingerprints import are_apart, can_read, projections
from tpplan.comm.placements import along_tp
from tpplan.comm.randomness import SEQUENCES, Randomness

PROCESS = (
    "its code computes with something that each process has for itself: numbers that a module "
    "keeps and that are no parameter, Python's or numpy's random numbers (seed them alike: "
    "random.seed, numpy.random.seed), a clock, the rank"
)
_DRIFTED = (
    "ranks changed it otherwise, or loaded it from elsewhere: clip gradients by a norm of the "
    "whole model (torch.nn.utils.clip_grad_norm_), and give all ranks of a tp group the same "
    "learning rate and state"
)
_OF_MODEL = {0, len(SEQUENCES)}
"""The sequences that nobody else draws from: torch's, of its device, and its own generators'."""
_ROUNDING = 1e-9
_LOOKED_AT = 2**16
"""Elements of a parameter that are compared."""


class Alike:
    """What one rank held to be alike on all of them during a call.

    That is: what enters a sharded region, or is cut into rows, and what the model gives out whole;
    parameters; and the random sequences, of those that were drawn from, where they stood before.
    """

    def __init__(
        self,
        group: Group,
        device_type: str,
        randomness: Randomness,
        generators: Sequence[torch.Generator],
        in_rows: bool,
    ) -> None:
        """``generators``: of the model's own. ``in_rows``: whether ranks have rows of a stream."""
        self._group, self._device_type = group, device_type
        self._randomness, self._generators = randomness, generators
        self._in_rows = in_rows
        self._sums: dict[str, torch.Tensor] = {}
        self._causes: dict[str, str] = {}
        self._met = 0

    @contextmanager
    def during(self, site: Site) -> Iterator[Callable[[torch.Tensor, Site], None]]:
        """Take down what the call within it shares out, and compare it in the end.

        Gives what takes down a tensor.

        Raises:
            ValueError: where ranks do not have the same.
        """
        ledger = self._group.ledger
        outer, before = ledger.noting, self._stands()
        ledger.noting = self._note
        try:
            yield self._note
        finally:
            ledger.noting = outer
        pairs = zip(before, self._stands(), strict=True)
        mask = sum(1 << i for i, (was, now) in enumerate(pairs) if was != now)
        self._compare(site, [mask, *before])

    def _stands(self) -> list[int]:
        own = b"".join(g.get_state().numpy().tobytes() for g in self._generators)
        return [*self._randomness.stands(), zlib.crc32(own)]

    def note_replicas(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take down the parameters that every rank has whole; of large ones where they begin."""
        with compat.unobserved():
            for name, parameter in parameters:
                if isinstance(parameter, DTensor) and along_tp(parameter).is_replicate():
                    whole = compat.local_of(parameter)
                    some = whole if whole.numel() <= _LOOKED_AT else whole.flatten()[:_LOOKED_AT]
                    self._note(some, Site(name, "parameter"), _DRIFTED)

    def _note(self, x: torch.Tensor, site: Site, cause: str = PROCESS) -> None:
        if compat.is_wrapped(x) or type(x) not in (torch.Tensor, torch.nn.Parameter):
            return
        if not can_read([x], self._device_type):
            return
        with compat.unobserved(), torch.no_grad():  # no op of the model's, to who counts or caches
            sums = projections(x).to(self._device_type)
        name = f"{site.module or 'the model'} ({site.reason})"
        self._met = (self._met + zlib.crc32(name.encode())) % 2**32  # in any order
        self._causes[name] = cause
        held = self._sums.get(name)
        self._sums[name] = sums if held is None else held + sums

    def _compare(self, site: Site, drawn: list[int]) -> None:
        own = torch.tensor([[self._met, *drawn]], dtype=torch.long, device=self._device_type)
        if not can_read([own], self._device_type):
            return
        with torch.no_grad():
            everyone = all_gather(own, 0, self._group.size, self._group, site).tolist()
            other, apart = apart_in([numbers for _, *numbers in everyone])
            # rows are not compared: there what was drawn is all that could be seen
            if other is not None and self._in_rows and apart & _OF_MODEL:
                raise ValueError(_said_of(other))
            another = first_other([met for met, *_ in everyone])
            if another is not None:
                raise ValueError(
                    f"rank {another} of the tensor-parallel group was given the same batch as rank "
                    f"0, and took another way through the model: {ONE_ORDER}; or {PROCESS}"
                )
            if not self._sums:
                return
            with compat.unobserved():
                mine = torch.stack([self._sums[name] for name in sorted(self._sums)])[None]
            found = all_gather(mine, 0, self._group.size, self._group, site)
        rank = next((i for i, far in enumerate(are_apart(found).any(-1)) if far), None)
        if rank is not None and other is not None:
            raise ValueError(_said_of(other))
        if rank is not None:
            self._raise_apart(found[[0, rank]], rank)

    def _raise_apart(self, found: torch.Tensor, rank: int) -> None:
        """``found``: (2, names, 5), of the first rank and of one that has something else."""

        def first_apart(among: Mapping[str, str], *tolerance: float) -> str | None:
            apart = dict(zip(sorted(self._sums), are_apart(found, *tolerance)[1], strict=True))
            return next((name for name in among if apart[name]), None)

        name = first_apart(self._causes)
        cause = self._causes[name or ""]
        replicas = {name: why for name, why in self._causes.items() if why is _DRIFTED}
        # where they have come apart only a little, results may have more
        drifted = first_apart(replicas, _ROUNDING)
        if drifted is not None and cause is PROCESS:
            cause = f"{PROCESS}; or, as {drifted} is not quite the same, {_DRIFTED}"
        raise ValueError(
            f"{name} is another one on rank {rank} of the tensor-parallel group than on rank 0, of "
            f"the same batch: {cause}"
        )


def _said_of(rank: int) -> str:
    return (
        f"the random state of rank {rank} of the tensor-parallel group was not that of rank 0 when "
        "the call began, and the model's code draws from it: give all ranks of a tp group the same "
        "torch.manual_seed, random.seed and numpy.random.seed (seed + data-parallel rank, say; not "
        "the rank in the world), and the model's own generators the same seed"
    )
