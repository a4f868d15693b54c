"""What decides into how many pieces products and their collectives are cut, on given hardware."""

from __future__ import annotations

import torch

from tpplan.comm.pace import Pace
from tpplan.cost.costs import collective_seconds
from tpplan.cost.hardware import DEFAULT, Hardware, load_hardware, shipped_hardware
from tpplan.language import FrozenMap

_KINDS = ("all_gather", "all_reduce", "reduce_scatter")
_LARGE = 1 << 30  # for which a ring is the fastest


def pace_of(hardware: Hardware, ranks: int) -> Pace:
    """That of ``ranks`` neighbours, by the α-β model and the roofline of a dry run."""
    real, links = hardware.reached, {}
    for kind in _KINDS:
        once, twice = (collective_seconds(kind, n * _LARGE, ranks, hardware) for n in (1, 2))
        each = (twice - once) / _LARGE
        links[kind] = once - each * _LARGE, each
    return Pace(real.flops, real.memory_bandwidth, FrozenMap(links))


def hardware_here(device_type: str) -> Hardware:
    """The shipped profile of the GPU at hand, by its name; the default one, where there is none."""
    if device_type == "cuda":
        name = torch.cuda.get_device_name().lower()
        for known, profile in shipped_hardware().items():
            if known.partition("-")[0] in name:
                return profile
    return load_hardware(DEFAULT)
