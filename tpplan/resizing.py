"""A vocabulary has its final size before its model is sharded."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

_TAUGHT = "_tpplan_resize_token_embeddings"


def teach_resizing(kind: type[nn.Module]) -> None:
    """Have ``resize_token_embeddings`` of transformers' class of models refuse sharded ones.

    A plan is of one vocabulary: who holds which tokens, what the loss masks. A call that asks for
    the size that there is goes through, as scripts make it whatever their tokenizer.
    """
    if _TAUGHT in vars(kind):
        return
    resize: Any = kind.resize_token_embeddings  # type: ignore[attr-defined]

    @functools.wraps(resize)
    def taught(
        self: Any,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        ends = (self.get_input_embeddings(), self.get_output_embeddings())
        cut = [end for end in ends if isinstance(getattr(end, "weight", None), DTensor)]
        if cut:
            there = cut[0].weight.shape[0]
            asked = there if new_num_tokens is None else new_num_tokens
            if pad_to_multiple_of:
                asked = -(-asked // pad_to_multiple_of) * pad_to_multiple_of
            if asked != there:
                raise ValueError(
                    f"resize_token_embeddings({asked}): the vocabulary of {there} is sharded "
                    "already, and its plan is of that size; resize the model before "
                    "tpplan.parallelize. Nothing was changed"
                )
        return resize(self, new_num_tokens, pad_to_multiple_of, *args, **kwargs)

    setattr(kind, _TAUGHT, resize)
    kind.resize_token_embeddings = taught  # type: ignore[attr-defined]
