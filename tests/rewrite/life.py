"""A small model with a parameter of every role, and what is compared of it over its life."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Errors, compare_gradients, error
from tests.models import randomize, weighed

WIDTH, HEADS, KV_HEADS, SIZE, INNER, VOCAB = 16, 4, 2, 4, 24, 29
TIGHT = 1e-9  # in float64
PLAN: Mapping[str, Any] = {
    "tpplan": 1,
    "rules": {
        "tok": "vocab",
        "layers.*.norms.*": "sequence_parallel",
        "layers.0.attn.qkv": {"style": "colwise", "packed": ["q", "k", "v"]},
        "layers.1.attn.{q,k,v}": "colwise",
        "layers.*.attn.out": "rowwise",
        "layers.*.up": "colwise",
        "layers.*.gain": "colwise",
        "layers.*.shift": "colwise",
        "layers.*.down": "rowwise",
        "norm": "sequence_parallel",
        "head": "vocab",
    },
}


class Attention(nn.Module):
    """Heads normalised one by one; ``kv``: how many key-value heads there are, where not packed."""

    def __init__(self, kv: int | None) -> None:
        super().__init__()
        self.kv = kv
        if kv is None:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q = nn.Linear(WIDTH, HEADS * SIZE)
            self.k, self.v = (nn.Linear(WIDTH, kv * SIZE) for _ in "kv")
        self.q_norm = nn.RMSNorm(SIZE)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As usual; in plain operations, which can be differentiated twice."""
        parts = self.qkv(x).chunk(3, -1) if self.kv is None else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in parts)
        if self.kv is not None:
            k, v = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v))
        weights = (self.q_norm(q) @ k.mT / SIZE**0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A layer with two bare parameters in its region that get one gradient."""

    def __init__(self, kv: int | None) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attn = Attention(kv)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.gain, self.shift = (nn.Parameter(torch.randn(INNER)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As usual."""
        x = x + self.attn(self.norms[0](x))
        inner = self.up(self.norms[1](x)).tanh()
        return x + self.down(inner * (self.gain + self.shift))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Token ids to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Layer(None), Layer(KV_HEADS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """As usual."""
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def built(seed: int = 1) -> Model:
    """The model in float64, every parameter random."""
    torch.manual_seed(seed)
    model = Model().double()
    randomize(model, seed, std=0.3)
    return model


def sharded(model: nn.Module, mesh: DeviceMesh, sp: bool, copied: bool = True) -> Any:
    """A sharded copy, and the model itself stays whole; or the model."""
    given = copy.deepcopy(model) if copied else model
    return tpplan.parallelize(given, PLAN, mesh, sequence_parallel=sp, prove=False)


def ids(seed: int, batch: int = 2, length: int = 9) -> torch.Tensor:
    """Token ids."""
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, seed: int = 3) -> torch.Tensor:
    """The loss of predicting the next token."""
    given = ids(seed)
    logits = model(given)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), given[:, 1:].flatten())


def alike(reference: Any, model: Any, seed: int = 3) -> Errors:
    """Logits, and the gradient of every parameter from a random weighing of them."""
    given, results = ids(seed), []
    for m in (reference, model):
        m.zero_grad()
        logits = m(given)
        weighed(logits).backward()
        results.append(logits.detach())
    return {"logits": error(*results), **compare_gradients(reference, model)}
