"""The least number of collectives a plan's sharded regions allow (Shoeybi 2019; Korthikanti 2022).

Every sequential sharded block costs one reduction forward and one backward, a vocab-parallel
embedding one forward, a vocab-parallel head one backward. Blocks whose outputs the model only
adds up (parallel attention and MLP) are one block; those of one input that are added up at other
places (an MLP, and experts beside the next attention) enter as one. A sum that a region goes on
with costs one each way besides.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from tpplan.compiled import CompiledPlan
from tpplan.language.styles import SHARD
from tpplan.proof.ranks import Reference
from tpplan.styles import named


def floor_of(reference: Reference, compiled: CompiledPlan) -> Mapping[str, Mapping[str, int]]:
    """Phase -> kind -> the least number, for one forward and backward without a loss."""
    modules = compiled.modules.values()
    sums = [
        m
        for m in modules
        if (named(m.style).sums and not m.partial) or (m.summed is not None and m.summed.outputs)
    ]
    sums = [m for m in sums if m.path in reference.called]
    inside = sum(named(m.style).stays(m.options) for m in sums)
    rows = [m for m in sums if not named(m.style).scatters(m.options)]
    scattered = len(sums) - len(rows)
    rows = [m for m in rows if not named(m.style).stays(m.options)]
    blocks = len({m.together or (m.path,) for m in rows})
    called = [m for m in modules if m.path in reference.called and not named(m.style).vocabulary]
    entries = min(blocks, len({b.number for m in called for b in m.boundaries}) or blocks)
    # a tied table that only holds the weight of others looks nothing up
    vocabs = [m for m in modules if named(m.style).vocabulary and m.path in reference.called]
    found = [m for m in vocabs if isinstance(reference.model.get_submodule(m.path), nn.Embedding)]
    tables = len(found)
    # those of one input (a head for each codebook) are entered together
    rest = (m for m in vocabs if m not in found)
    heads = len({m.boundaries[0].number if m.boundaries else m.path for m in rest})
    if compiled.tp == 1:  # none but those of ep
        blocks = entries = tables = heads = scattered = 0
    if compiled.sequence_parallel:
        forward = {"reduce_scatter": blocks + tables + scattered, "all_gather": entries + 2 * heads}
        backward = {"reduce_scatter": entries + heads, "all_gather": blocks + tables + scattered}
        forward["all_reduce"] = backward["all_reduce"] = inside
        if compiled.plan.save == SHARD:  # what enters regions and heads is gathered again
            backward["all_gather"] += entries + heads
    else:
        made, given = blocks + inside, entries + inside
        forward = {"all_reduce": made + tables, "all_gather": heads, "reduce_scatter": scattered}
        backward = {"all_reduce": given + heads, "all_gather": scattered}
    sent = sum(m.dispatched for m in modules if m.path in reference.called)
    if sent:  # there and back, each way; forward their numbers before
        forward["all_to_all"], backward["all_to_all"] = 3 * sent, 2 * sent
    return {"forward": forward, "backward": backward}
