"""Collectives: the conjugate pairs, the sequence-sharded stream, summed gradients; randomness."""

from tpplan.comm.collectives import Group, Observer, Site, chunk
from tpplan.comm.conjugates import (
    Transition,
    copy_in,
    divide_gradient,
    gather_in,
    is_divided,
    join,
    reduce_out,
    scatter_out,
    split,
)
from tpplan.comm.gradients import localize
from tpplan.comm.randomness import Randomness
from tpplan.comm.stream import Stream

__all__ = [
    "Group",
    "Observer",
    "Randomness",
    "Site",
    "Stream",
    "Transition",
    "chunk",
    "copy_in",
    "divide_gradient",
    "gather_in",
    "is_divided",
    "join",
    "localize",
    "reduce_out",
    "scatter_out",
    "split",
]
