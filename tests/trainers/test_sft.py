"""TRL's SFTTrainer with a sharded model."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.checkpoint.folders import shared_folder
from tests.compare import Errors, beyond
from tests.models import VOCAB
from tests.ranks import Ranks
from tests.rewrite import MODES
from tests.trainers.training import Texts, compared, fresh, plain, reference, sharded, watched


def tokenizer() -> Any:
    """A word for every token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    made = Tokenizer(models.WordLevel(words, unk_token="w3"))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def sft_job(mesh: DeviceMesh, sp: bool) -> Errors:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    fresh()
    losses: list[float] = []

    class InOrder(watched(SFTTrainer, losses)):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    texts = Texts()
    rows = [
        {"input_ids": texts.ids[i].tolist(), "labels": texts.labels[i].tolist()}
        for i in range(len(texts))
    ]
    chosen = SFTConfig(bf16=False, **plain(shared_folder()))
    model = sharded(mesh, sp)
    trainer = InOrder(
        model=model,
        args=chosen,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    trainer.train()
    return compared(model, losses, reference(1))


@MODES
def test_training(pair: Ranks, sp: bool) -> None:
    """TRL recomputes activations and averages over tokens, unless told otherwise."""
    assert not beyond(pair.run(2, sft_job, sp))
