"""Vocab-parallel embedding and head: each rank holds a range of the vocabulary's rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tpplan import compat
from tpplan.comm import chunk, join, reduce_out, scatter_out
from tpplan.rewrite.lowered import Lowered
from tpplan.rewrite.streams import require_sequence


class VocabEmbedding(Lowered, nn.Embedding):
    """A masked look-up of this rank's rows, summed over the ranks.

    Under sequence parallelism the sum is scattered at once, and the model's own code gets the
    stream in its global form. An id outside the vocabulary raises as it does unsharded.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        state = self._tpplan
        stream = state.stream
        if stream.sequence_parallel and state.plan.options.get("output") != "gather":
            require_sequence(input, stream.dim + 1, state.plan.path)
        (weight,) = self._locals()
        rows = weight.size(0)
        first = chunk(self.num_embeddings, stream.group.size) * stream.group.rank
        local = input - first
        elsewhere = (local < 0) | (local >= rows)
        known = (input >= 0) & (input < self.num_embeddings)
        local = local.masked_fill(elsewhere & known, 0)
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < rows:
            padding = None
        partial = F.embedding(local, weight, padding).masked_fill(elsewhere.unsqueeze(-1), 0)
        gathered = state.plan.options.get("output") == "gather"
        if not stream.sequence_parallel or gathered:
            return reduce_out(partial, state.transition)
        out = scatter_out(partial, stream.dim, state.transition)
        if stream.length is not None:
            return out
        length = input.size(stream.dim)
        if stream.inside:
            return stream.to_global(out, length)
        return join(out, stream.dim, length, state.transition)


class VocabHead(Lowered):
    """Logits of this rank's range of the vocabulary; gathered, or a DTensor where the plan asks.

    A sharded result is a DTensor of the global shape: a loss that views it by the vocabulary's
    size would misread a plain shard.
    """

    out_features: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        state = self._tpplan
        logits = F.linear(input, *self._locals())
        last = logits.dim() - 1
        if state.plan.options.get("output") == "shard":
            shape = (*logits.shape[:-1], self.out_features)
            mesh = state.stream.mesh
            whole = compat.dtensor_spec(mesh, [Shard(last)], shape, logits.dtype).tensor_meta
            assert whole is not None
            return DTensor.from_local(
                logits,
                mesh,
                [Shard(last)],
                run_check=False,
                shape=whole.shape,
                stride=whole.stride,
            )
        return join(logits, last, self.out_features, state.transition)
