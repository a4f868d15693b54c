"""Models that drop out, by modules and by functions, and what is looked at of their masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from tests.compare import Errors, gradients, local, same
from tests.gpt import GPT
from tests.models import VOCAB, hf, randomize

P = 0.2
Masks = list[torch.Tensor]


class FunctionalBlock(nn.Module):
    """A post-norm layer that drops out with functions, in its own forward, as BART's do.

    Sharded activations too, where ``activation`` is not 0.
    """

    def __init__(self, width: int, activation: float) -> None:
        super().__init__()
        self.activation = activation
        self.attn = FunctionalAttention(width)
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc, self.proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.attn(x), P, self.training)
        x = self.ln1(x + y)
        y = F.dropout(self.fc(x).relu(), self.activation, self.training)
        return self.ln2(x + F.dropout(self.proj(y), P, self.training))


class OneModuleBlock(FunctionalBlock):
    """Has one module for everything, as XLNet's layers."""

    def __init__(self, width: int, activation: float) -> None:
        super().__init__(width, activation)
        self.drop = nn.Dropout(activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ln1(x + self.dropped(self.attn(x)))
        y = self.dropped(self.fc(x).relu())
        return self.ln2(x + self.drop(self.proj(y)))

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x)


class OneLineBlock(FunctionalBlock):
    """Drops sharded and whole activations out in one line."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x = self.ln1(x + self.attn(x))
        for layer in (self.fc, self.proj):
            y = F.dropout(layer(y).relu(), self.activation, self.training)
        return self.ln2(x + y)


class FunctionalAttention(nn.Module):
    """Drops attention weights out with a function, and its output with a module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.resid = nn.Dropout(P)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (self.q, self.k, self.v))
        weights = F.dropout((q @ k.transpose(2, 3)).softmax(-1), P, self.training)
        return self.resid(self.out((weights @ v).transpose(1, 2).flatten(2)))


class Functional(nn.Module):
    """Drops the embeddings out with a function in the model's own forward."""

    def __init__(
        self,
        width: int = 64,
        activation: float = 0.0,
        layers: int = 2,
        block: type[FunctionalBlock] = FunctionalBlock,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(block(width, activation) for _ in range(layers))
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.reentrant: bool | None = None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.embed(input_ids), P, self.training)
        for layer in self.layers:
            x = through(layer, x, self.reentrant)
        return self.head(x)


class TokensLayer(nn.Module):
    """Works on tokens without their batch, as OPT's layers do."""

    def __init__(self, function: bool) -> None:
        super().__init__()
        self.fc, self.out, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(P)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.size(-1))
        made = self.out(self.fc(tokens).relu())
        made = F.dropout(made, P, self.training) if self.function else self.drop(made)
        return (tokens + made).view(x.shape)


class Tokens(nn.Module):
    """Such layers."""

    def __init__(self, function: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TokensLayer(function) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


FUNCTIONAL: dict[str, Any] = {
    "tpplan": 1,
    "rules": {
        "embed": "vocab",
        "layers.*.attn.{q,k,v}": "colwise",
        "layers.*.attn.out": "rowwise",
        "layers.*.{ln1,ln2}": "sequence_parallel",
        "layers.*.fc": "colwise",
        "layers.*.proj": "rowwise",
        "head": "vocab",
    },
}


class CheckpointedGPT(GPT):
    """Recomputes its blocks, where asked to."""

    reentrant: bool | None = None

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(idx.size(1), device=idx.device)
        x = self.drop(self.tok_emb(idx) + self.pos_emb(positions))
        for block in self.blocks:
            x = through(block, x, self.reentrant)
        return self.head(self.ln_f(x))


def through(layer: nn.Module, x: torch.Tensor, reentrant: bool | None) -> torch.Tensor:
    return layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)


def llama(implementation: str = "eager") -> Any:
    """Logits of a Llama with dropout on its attention weights, and nothing else."""
    return hf("Llama", attention_dropout=P, attn_implementation=implementation)


def bart() -> Any:
    """A BART, whose layers drop out whatever they make with functions."""
    import transformers

    config = transformers.BartConfig(
        vocab_size=VOCAB,
        d_model=64,
        max_position_embeddings=64,
        **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
        **{f"{part}_attention_heads": 8 for part in ("encoder", "decoder")},
        **{f"{part}_ffn_dim": 96 for part in ("encoder", "decoder")},
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), P),
        attn_implementation="eager",
    )
    model = transformers.BartForConditionalGeneration(config)
    randomize(model, 7)
    return model.train()


def gpt(layers: int = 2) -> CheckpointedGPT:
    model = CheckpointedGPT(vocabulary=VOCAB, layers=layers, dropout=P).train()
    randomize(model, 3)
    return model


def functional(
    activation: float = 0.0, layers: int = 2, block: type[FunctionalBlock] = FunctionalBlock
) -> Functional:
    model = Functional(activation=activation, layers=layers, block=block).train()
    randomize(model, 4)
    return model


# without the rules for dropout modules: nothing needs to be said about them
BARE_GPT: dict[str, Any] = {
    "tpplan": 1,
    "extends": "gpt.yaml",
    "rules": {"drop": "remove", "blocks.*.drop": "remove"},
}
MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "GPT": (gpt, "gpt"),
    "functional": (functional, FUNCTIONAL),
    "functional, for both": (lambda: functional(P), FUNCTIONAL),
    "a module for both": (lambda: functional(P, block=OneModuleBlock), FUNCTIONAL),
    "BART, for both": (bart, "bart.yaml"),
    "Llama": (llama, "llama.yaml"),
}
BARE: dict[str, tuple[Callable[[], Any], Any]] = {"GPT, no rules for dropout": (gpt, BARE_GPT)}
FUSED: dict[str, tuple[Callable[[], Any], Any]] = {
    "Llama, sdpa": (lambda: llama("sdpa"), "llama.yaml")
}


def objective(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def gathered(value: Any, mesh: DeviceMesh) -> list[Any]:
    """What each rank has."""
    everybody: list[Any] = [None] * mesh.size()
    dist.all_gather_object(everybody, value, group=mesh.get_group())
    return everybody


def masks_errors(kind: str, pieces: Masks) -> Errors:
    if kind == "whole":
        return {"agree": same(all(torch.equal(p, pieces[0]) for p in pieces))}
    fewest = min(p.numel() for p in pieces)  # the last rows of a DTensor are not padded
    shares = [(p != 0).double().flatten()[:fewest] for p in pieces]
    worst = 0.0
    for i, a in enumerate(shares):
        for b in shares[:i]:
            correlation = ((a - a.mean()) * (b - b.mean())).mean() / (a.std() * b.std())
            worst = max(worst, abs(correlation.item()) * math.sqrt(a.numel()))
    return {f"independent, z {worst}": same(worst < 4.5)}


def run(model: Any, ids: torch.Tensor, seed: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Loss, and what this rank holds of the gradients, from a seed."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = objective(model, ids)
    loss.backward()
    return loss.detach(), {n: local(g) for n, g in gradients(model).items() if g is not None}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a.keys() | b.keys())
