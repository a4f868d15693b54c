"""Vocab-parallel embedding and head: each rank holds a range of the vocabulary's rows."""

from __future__ import annotations

import torch
from torch import nn

from tpplan.comm import chunk, join, reduce_out, scatter_out
from tpplan.kernels.embedding import look_up, reference
from tpplan.roles.logits import Origin
from tpplan.roles.lowered import Lowered
from tpplan.roles.members import hand_over_late


class VocabEmbedding(Lowered, nn.Embedding):
    """A masked look-up of this rank's rows, summed over the ranks.

    Under sequence parallelism the sum is scattered at once, and the model's own code gets the
    stream in its global form; of ids that are no sequences it gets the sum itself. An id outside
    the vocabulary raises as it does unsharded.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        state = self._tpplan
        stream = state.stream
        partial = self._look_up(input)
        gathered = state.plan.options.get("output") == "gather" or input.dim() <= stream.dim
        if not stream.sequence_parallel or gathered:
            return reduce_out(partial, state.transition)
        out = scatter_out(partial, stream.dim, state.transition)
        if state.length is not None:
            return out
        length = input.size(stream.dim)
        if state.inside:
            return stream.to_global(out, length)
        return join(out, stream.dim, length, state.transition)

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """This rank's rows, and zeros for the ids of others."""
        state = self._tpplan
        group = state.transition.group
        (weight,) = self._locals()
        first = chunk(self.num_embeddings, group.size) * group.rank
        known = (ids >= 0) & (ids < self.num_embeddings)
        if "embedding" in state.stream.fused:
            torch._assert_async(known.all())
            return self._tpplan_widen(look_up(ids, weight, first, self.padding_idx))
        return self._tpplan_widen(reference(ids, weight, first, self.padding_idx, known))


class VocabHead(Lowered):
    """Logits of this rank's range of the vocabulary.

    The model's own code gets them as ``Logits`` of the global shape, from which its loss is
    computed without a gather; what leaves the model is decided where it does (``Container``). A
    user who calls the head gets them whole, or sharded where the plan asks.
    """

    out_features: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        state = self._tpplan
        stream = state.stream
        locals_ = self._locals()
        hand_over_late(self)
        logits = self._tpplan_project(input, *locals_)
        last = logits.dim() - 1
        output = state.plan.options.get("output")
        compiling = torch.compiler.is_compiling()
        if not compiling and (state.inside or output == "shard"):
            return Origin(stream, state.transition, self.out_features, output).wrap(logits)
        if output == "shard":
            return stream.to_global(logits, self.out_features, last)
        return join(logits, last, self.out_features, state.transition)
