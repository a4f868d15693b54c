"""Where sharded tensors come from: the ranks that hold their rows, and all of these gathered."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tpplan import compat
from tpplan.comm.collectives import Group, Site, all_gather, chunk, first_rows, packed, pad
from tpplan.comm.conjugates import Transition
from tpplan.comm.placements import along_tp, dim_of
from tpplan.comm.randomness import Randomness
from tpplan.compat import local_of, spec_of

# what every backend sends; others are sent as bytes
SENT = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64})


class Source:
    """Where sharded tensors come from, which all that is computed from them refer to.

    Attributes:
        group: of the ranks that hold the parts.
        site: what a gather is reported under.
        randomness: the random sequences of this rank.
        kind: the class of these tensors.
        specs: those that were made, as making one takes long.
    """

    __slots__ = ("__weakref__", "group", "kind", "randomness", "site", "specs")

    def __init__(
        self, group: Group, site: Site, randomness: Randomness, kind: type[Rooted]
    ) -> None:
        self.group, self.site = group, site
        self.randomness, self.kind = randomness, kind
        self.specs: dict[tuple[Any, ...], compat.DTensorSpec] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Source:
        return self

    @property
    def mesh(self) -> DeviceMesh:
        """Of the ranks that hold the parts."""
        return self.group.mesh

    @property
    def transition(self) -> Transition:
        """From rows to the whole tensor, and back."""
        return Transition(self.group, self.site, self.site)

    def rows(self, length: int) -> tuple[int, int]:
        """The first of this rank's rows of ``length``, and how many they are."""
        each = chunk(length, self.group.size)
        start = compat.smaller(each * self.group.rank, length)
        return start, compat.smaller(each, length - start)

    def unpadded(self, rows: torch.Tensor, length: int, dim: int) -> torch.Tensor:
        """``rows`` without the padding that makes all ranks' as many."""
        count = rows.size(dim)
        if compat.always(count * self.group.size == length):
            return rows
        mine = compat.smaller(count, self.rows(length)[1])
        return rows if compat.always(mine == count) else packed(first_rows(rows, dim, mine))

    def spec(self, rows: torch.Tensor, length: int, dim: int) -> compat.DTensorSpec:
        """Of a contiguous tensor that is ``length`` along ``dim``, and else as its ``rows``."""
        shape = list(rows.shape)
        shape[dim] = length
        key = (*shape, dim, rows.dtype)
        try:
            spec = self.specs.get(key)
        except TypeError:  # of sizes that are symbols to torch.compile
            return compat.dtensor_spec(self.mesh, (Shard(dim),), shape, rows.dtype)
        if spec is None:
            if len(self.specs) > 64:  # lengths change at every step of a decoding loop
                self.specs.clear()
            spec = compat.dtensor_spec(self.mesh, (Shard(dim),), shape, rows.dtype)
            if type(along_tp(spec)) is Shard:  # and not what stands for one in a trace
                self.specs[key] = spec
        return spec

    def own(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's rows of a whole tensor."""
        return whole.narrow(dim, *self.rows(whole.size(dim)))

    def gathered(self, rows: torch.Tensor, dim: int, length: int, why: str) -> torch.Tensor:
        """The whole tensor of this rank's rows, without autograd."""
        site = replace(self.site, reason=f"{self.site.reason} for {why}")
        dtype = rows.dtype
        sent = rows if dtype in SENT else rows.contiguous().unsqueeze(-1).view(torch.uint8)
        sent = pad(sent, dim, chunk(length, self.group.size))
        whole = all_gather(sent, dim, length, self.group, site)
        return whole if dtype in SENT else whole.contiguous().view(dtype).squeeze(-1)


class Writes:
    """Those to a tensor and its views.

    Attributes:
        count: of them.
        copies: to be made before the next one.
    """

    __slots__ = ("copies", "count")

    def __init__(self) -> None:
        self.count = 0
        self.copies: list[weakref.ref[Rooted]] = []

    def ahead(self) -> None:
        """The rows may be written to now."""
        while self.copies:
            copy = self.copies.pop()()
            if copy is not None:
                local_of(copy)


class Rooted(DTensor):
    """A DTensor that knows its source, and what it is gathered."""

    _tpplan_source: Source
    _tpplan_whole: Whole | None = None
    _tpplan_writes: Writes | None = None

    def _tpplan_writable(self) -> Writes:
        if self._tpplan_writes is None:
            self._tpplan_writes = Writes()
        return self._tpplan_writes

    def __getstate__(self) -> Any:
        """What is saved of it: as of any DTensor; what it has of its process is made anew."""
        if self._tpplan_writes is not None:
            self._tpplan_writes.ahead()
        state: Any = super().__getstate__()
        attributes, slots = state
        kept = {n: v for n, v in attributes.items() if not n.startswith("_tpplan")}
        return kept, slots

    def numpy(self, *, force: bool = False) -> Any:
        """The whole as numpy has it, on every rank."""
        return self.full_tensor().numpy(force=force)

    def tolist(self) -> Any:
        """The whole as Python's numbers, on every rank."""
        return self.full_tensor().tolist()


def wrapped(rows: torch.Tensor, source: Source, spec: compat.DTensorSpec) -> Rooted:
    """``rows`` of this rank as a tensor of the shape in ``spec``; outside autograd."""
    x = compat.dtensor(rows, spec, source.kind)
    x._tpplan_source = source  # type: ignore[attr-defined]
    return x  # type: ignore[return-value]


class Whole:
    """A sharded tensor gathered, and what keeps the two alike."""

    __slots__ = ("_seen", "rows", "source", "tensor", "writes")

    def __init__(self, x: Rooted, why: str) -> None:
        # not x, which refers to this
        self.source = x._tpplan_source
        self.rows = wrapped(local_of(x), self.source, spec_of(x))
        self.writes = x._tpplan_writable()
        self.tensor = self._gathered(why)
        self._seen = self._version()

    @staticmethod
    def of(x: Rooted, why: str, again: bool) -> Whole:
        """What ``x`` is, whole: kept with it where a gradient will ask for it ``again``."""
        kept = x._tpplan_whole
        if kept is not None and kept._seen == kept._version():
            return kept
        made = Whole(x, why)
        if again:
            x._tpplan_whole = made
        return made

    def _gathered(self, why: str) -> torch.Tensor:
        x, dim = self.rows, dim_of(self.rows)
        made = self.source.gathered(local_of(x), dim, x.size(dim), why)
        return made.contiguous()  # kernels rely on what x says of itself, and views on strides

    def _version(self) -> tuple[int, int]:
        # ops on a sharded tensor do not count in its rows' version, direct ones do
        rows = local_of(self.rows)
        return self.writes.count, 0 if rows.is_inference() else rows._version

    def refresh(self, why: str) -> None:
        """Take over what was written to the rows."""
        if self._seen != self._version():
            self.tensor.copy_(self._gathered(why))
            self._seen = self._version()

    def write_back(self) -> None:
        """Give the rows what was written to the whole."""
        self.writes.ahead()
        local_of(self.rows).copy_(self.source.own(self.tensor, dim_of(self.rows)))
        self.writes.count += 1
        self._seen = self._version()
