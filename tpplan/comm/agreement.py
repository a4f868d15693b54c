"""Whether the ranks of a group agree: on what they are fed, send, draw, and on gradients."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tpplan import compat
from tpplan.comm.collectives import Group, Site, all_gather
from tpplan.comm.conjugates import is_copied
from tpplan.comm.fingerprints import FIRST, are_apart, can_read, fingerprint, projections
from tpplan.comm.randomness import SEQUENCES, Randomness

SWITCH = "TPPLAN_CHECK_RANKS"
ONE_ORDER = (
    "code that goes through a set, say, goes another way in each process; let it go through a "
    "list, or sort it"
)
UNKNOWN_INPUT = (
    "the model was not called with it when the plan was compiled, and each rank computes with it "
    "what its part of the layers needs; give it in inputs= of tpplan.parallelize"
)
OTHER_LOSS = (
    "all ranks of a tp group must make the same loss of what the model gives: of the same labels, "
    "and with the same random numbers"
)
SHARED_HEADS = (
    "keys and values of heads that ranks share, which were not made by the model, get of each "
    "rank what its own queries make of them; train embeddings (inputs_embeds=) in their place, or "
    "use no more ranks than there are KV heads"
)
_OFTEN = 256


class Schedule:
    """When the ranks compare what they are given: at calls that all of them count alike.

    The first, second, fourth, ... call, every 256th, and each of another kind than the one before
    it: the prompt and the first token of every generation, the first call of an evaluation. The
    environment variable ``TPPLAN_CHECK_RANKS`` says otherwise: 0 for never, "every" for each call.

    Attributes:
        calls: how many there were.
        counted: whether the last one is due by its number; where its kind is another, by how often
            that came: what takes longer is compared then.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.counted = False
        self._kind: object = None
        self._times: dict[object, int] = {}
        self._switch = os.environ.get(SWITCH, "1")
        if self._switch not in ("0", "1", "every"):
            raise ValueError(f"{SWITCH} is {self._switch!r}; it may be 0, 1 or every")

    def due(self, kind: object) -> bool:
        """Whether the call that begins, of that kind, is one to compare at."""
        self.calls = n = self.calls + 1
        changed, self._kind = kind != self._kind, kind
        counted = n & (n - 1) == 0 or n % _OFTEN == 0
        times = self._times[kind] = self._times.get(kind, 0) + changed
        self.counted = counted or (changed and times & (times - 1) == 0) or self._switch == "every"
        if self._switch != "1":
            return self._switch == "every"
        return changed or counted


def require_same_inputs(
    inputs: Any,
    group: Group,
    site: Site,
    device_type: str,
    randomness: Randomness | None = None,
    draws: Collection[str] = (),
) -> None:
    """Compare a fingerprint of the tensors in ``inputs`` over the ranks; one small all-gather.

    Args:
        device_type: that the ranks send from.
        draws: which sequences of ``randomness`` the model is going to draw from. What one rank
            says of its code is taken to go for all.

    Raises:
        ValueError: where a rank was given other inputs than the first, stands elsewhere in the
            random sequence, or has sent something else before.
    """
    tensors = list(_compared(inputs))
    if not can_read(tensors, device_type):
        return
    own = [sum(1 << i for i, name in enumerate(SEQUENCES) if name in draws)]
    own += [0] * len(SEQUENCES) if randomness is None else randomness.stands()
    everybody = _everybody(tensors, group, site, device_type, own)
    other = first_other([sent for _, sent, *_ in everybody])
    if other is not None:
        raise ValueError(
            f"rank {other} of the tensor-parallel group has sent something else than rank 0 since "
            "they were compared last, or in another order, so that what both computed is wrong: "
            f"{ONE_ORDER}"
        )
    other = first_other([batch for batch, *_ in everybody])
    if other is not None:
        raise ValueError(
            f"rank {other} of the tensor-parallel group was given another batch than rank 0: "
            "all ranks of a tp group must be fed the same inputs (give a DistributedSampler the "
            "data-parallel ranks, not the whole world; when tokens are sampled, give all ranks of "
            "a tp group the same torch.manual_seed)"
        )
    other, _ = apart_in([numbers for _, _, *numbers in everybody])
    if other is not None:
        raise ValueError(
            f"the random state of rank {other} of the tensor-parallel group is not that of rank 0, "
            "and dropout on tensors that every rank holds whole must agree: give all ranks of a "
            "tp group the same torch.manual_seed (seed + data-parallel rank, say; not the rank in "
            "the world), and random.seed and numpy.random.seed where the model draws from these"
        )


def require_same_routing(
    chosen: list[torch.Tensor], group: Group, site: Site, device_type: str
) -> None:
    """Compare which experts the ranks chose for their tokens; one small all-gather.

    Raises:
        ValueError: where a rank chose others than the first.
    """
    if not can_read(chosen, device_type):
        return
    everybody = _everybody(chosen, group, site, device_type)
    other = first_other([choice for choice, *_ in everybody])
    if other is not None:
        raise ValueError(
            f"{site.module}: rank {other} of the tensor-parallel group sends tokens to other "
            "experts than rank 0, so that their parts are no sum: scores that tie may be ordered "
            "in any way; set torch.use_deterministic_algorithms(True), and give all ranks the "
            "same router weights and torch.manual_seed"
        )


def compare_gradients(
    inputs: Mapping[Any, Any], group: Group, site: Site, device_type: str
) -> None:
    """Have the ranks compare the gradients that the next backward makes of ``inputs``.

    Of what the plan was compiled with, each rank gets all of it. What is given now and was not then
    may come into the layers where each has a part.

    Raises:
        RuntimeError: in that backward, on all ranks, where they differ.
    """
    for name, value in inputs.items():
        for t in _compared(value):
            if t.requires_grad and not isinstance(t, DTensor) and not is_copied(t):
                compare_gradient(t, f"'{name}'", UNKNOWN_INPUT, group, site, device_type)


def compare_gradient(
    given: torch.Tensor, name: str, cause: str, group: Group, site: Site, device_type: str
) -> None:
    """Have the ranks compare the gradient that the next backward makes of ``given``.

    Raises:
        RuntimeError: in that backward, on all ranks, where it differs; with the likely ``cause``.
    """

    def compare(grad: torch.Tensor) -> None:
        handle.remove()
        if compat.is_wrapped(grad) or not can_read([grad], device_type):
            return
        with compat.unobserved(), torch.no_grad():
            mine = projections(grad)[None].to(device_type)
        with torch.no_grad():
            found = all_gather(mine, 0, group.size, group, site)
        if are_apart(found).any():
            raise RuntimeError(
                f"the gradient of {name} is another one on each rank of the tensor-parallel "
                f"group: {cause}"
            )

    handle = given.register_hook(compare)


def _everybody(
    tensors: list[torch.Tensor],
    group: Group,
    site: Site,
    device_type: str,
    numbers: Sequence[int] = (),
) -> list[list[int]]:
    """Of all ranks, a fingerprint of ``tensors``, of what they sent, and the other ``numbers``."""
    with torch.no_grad():
        mine = _fingerprints(tensors, group, device_type, numbers)
        found: list[list[int]] = all_gather(mine, 0, group.size, group, site).tolist()
    return found


def first_other(values: list[int]) -> int | None:
    """The first rank whose value is not that of rank 0."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


def apart_in(everybody: list[list[int]]) -> tuple[int | None, frozenset[int]]:
    """The first rank whose random sequences are not where those of rank 0 are, and which.

    Args:
        everybody: of each rank a mask of those that it draws from, and where they all stand.
    """
    drawn = functools.reduce(operator.or_, (mask for mask, *_ in everybody), 0)
    found: dict[int, int] = {}
    for i, stands in enumerate(zip(*(stands for _, *stands in everybody), strict=True)):
        other = first_other(list(stands)) if drawn >> i & 1 else None
        if other is not None:
            found[i] = other
    return min(found.values(), default=None), frozenset(found)


def _compared(inputs: Any, listed: bool = False) -> Iterator[torch.Tensor]:
    """The tensors in ``inputs``, and of lists in them those that do not float.

    Lists of floating tensors are keys and values that the model gave out before: each rank has
    those of its own heads.
    """
    if isinstance(inputs, torch.Tensor):
        if not listed or not (inputs.is_floating_point() or inputs.is_complex()):
            yield inputs
    elif isinstance(inputs, Mapping):
        # in an order of ours: that of a set that they were made from is each process' own
        for key in sorted(inputs, key=str):
            yield from _compared(inputs[key], listed)
    elif isinstance(inputs, list | tuple):
        for value in inputs:
            yield from _compared(value, listed=True)


def _fingerprints(
    tensors: list[torch.Tensor], group: Group, device_type: str, numbers: Sequence[int]
) -> torch.Tensor:
    """(1, 2 + numbers) of this rank, on the device it sends from: of its inputs, what it sent."""
    others = [group.ledger.sent, *numbers]
    told = torch.tensor(others, dtype=torch.long, device=device_type)
    batch = torch.full((), len(tensors), dtype=torch.long, device=device_type)
    for t in tensors:  # in their order: what two of them swap is noticed
        batch = batch * FIRST + fingerprint(t, group).to(device_type)
    return torch.cat([batch[None], told])[None]
