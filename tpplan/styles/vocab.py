"""``vocab``: each rank has a range of the vocabulary, of an embedding or of a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from tpplan.compiled import ModulePlan
from tpplan.language import Rule
from tpplan.language.styles import ROWS
from tpplan.layout import Rows
from tpplan.roles.reads import Table
from tpplan.roles.vocab import VocabEmbedding, VocabHead
from tpplan.styles.style import (
    Factor,
    Roles,
    Style,
    adds_to_embedding,
    kept,
    runs_as,
    without_weight,
)

if TYPE_CHECKING:
    from tpplan.observe.trace import Call
    from tpplan.planner.walk import Walk


class Vocab(Style):
    """A table of embeddings, or a head that makes logits."""

    name = "vocab"
    vocabulary = True
    bare = frozenset()
    hf = ("embedding_rowwise",)

    def complaint(self, module: nn.Module, tp: int) -> str | None:
        """It must be torch's, with rows for every rank."""
        if (wrong := without_weight(module)) is not None and isinstance(module, nn.Embedding):
            return wrong
        if isinstance(module, nn.Embedding):
            if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
                return "an Embedding with max_norm, scale_grad_by_freq or sparse cannot be sharded"
            rows = int(module.num_embeddings)  # type: ignore[arg-type]
        elif runs_as(module, nn.Linear):
            rows = int(module.out_features)  # type: ignore[arg-type]
        else:
            return f"{type(module).__name__} is neither a torch.nn.Embedding nor a torch.nn.Linear"
        if rows <= (tp - 1) * -(-rows // tp):
            return f"its {rows} rows leave a rank of {tp} without any"
        return None

    def is_head(self, module: nn.Module) -> bool:
        """Whether it multiplies instead of looking up."""
        return isinstance(module, nn.Linear)

    def low_rank(self, options: Mapping[str, object]) -> tuple[Factor, Factor] | None:
        """A works on a rank's rows of the stream, B is a head beside the module."""
        return (ROWS, {}), (self.name, kept(options, "output"))

    def placement(
        self, leaf: str, module: nn.Module, transposed: bool, rows: Rows | None
    ) -> Placement:
        """Cut by the vocabulary."""
        return Shard(0)

    def place(self, parameter: torch.Tensor, rule: Rule, tp: int) -> Placement:
        """Cut by the vocabulary."""
        return Shard(0)

    def enter(self, walk: Walk, call: Call, given: int | None) -> None:
        """A head is given the stream."""
        if call.path in walk.boundaries:
            walk.refuse_sharded(call, given)

    def leave(self, walk: Walk, call: Call) -> None:
        """A table gives the stream; logits are neither the stream nor columns of a region.

        Where it is given no sequences (a class for each sample), what it gives is whole.
        """
        walk.gives_whole(call)
        if call.path not in walk.boundaries and call.path not in walk.gathered:
            made = (n for n in call.outputs if len(walk.trace.shapes[n]) > walk.dim + 1)
            walk.stream.update(made)

    def roles(self, plan: ModulePlan, module: nn.Module, fused: type[nn.Module] | None) -> Roles:
        """A look-up or a head; other modules' code may read the table."""
        read: list[type[nn.Module]] = [Table] if plan.read else []
        if adds_to_embedding(module):
            return read, VocabEmbedding
        return [VocabHead if self.is_head(module) else VocabEmbedding, *read], None

    def reasons(self, plan: ModulePlan) -> tuple[str, str]:
        """Of a head, or of a table."""
        if plan.boundaries:
            return "logits, gathered", "gradient of the logits"
        return "look-ups of each rank's rows, summed", "gradient of its output"


VOCAB = Vocab()
