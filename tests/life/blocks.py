"""One small model for every role a module takes on in a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.life.parts import (
    HEAD,
    INNER,
    MLP,
    VOCAB,
    WIDTH,
    Attention,
    Conv1D,
    Layer,
    Quiet,
    RMSNorm,
    Stack,
    attend,
    heads,
)

Call = tuple[tuple[Any, ...], dict[str, Any]]


def hidden(batch: int, length: int, seed: int) -> Call:
    """A tensor on the stream."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(batch, length, WIDTH, generator=generator, dtype=torch.float64),), {}


def tokens(batch: int, length: int, seed: int) -> Call:
    """Token ids, and labels, of which one is to be ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (batch, length), generator=generator)
    labels = ids.roll(-1, 1)
    labels[0, 0] = -100
    return (ids,), {"labels": labels}


@dataclass(frozen=True)
class Block:
    """A model and its plan.

    Attributes:
        alone: modules that can be called on their own: they are given whole tensors and answer so.
        parts: column-parallel layers in them, whose own answer is this rank's columns.
        call: inputs of a batch, a length and a seed.
        layers: the stack, where it is not what is around the row-parallel layers.
    """

    make: Callable[[], nn.Module]
    rules: Mapping[str, Any]
    alone: tuple[str, ...]
    parts: tuple[str, ...] = ()
    call: Callable[[int, int, int], Call] = hidden
    layers: str | None = None

    @property
    def plan(self) -> dict[str, Any]:
        """The plan as a mapping."""
        stack = {} if self.layers is None else {"layers": self.layers}
        return {"tpplan": 1, **stack, "rules": dict(self.rules)}


class MLPLayer(Layer):
    """An MLP on the stream."""

    def __init__(self, index: int, **options: bool) -> None:
        super().__init__(index)
        self.mlp = MLP(**options)

    def inside(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        return self.mlp(x)


class AttentionLayer(Layer):
    """Any attention on the stream."""

    def __init__(self, index: int, attention: nn.Module) -> None:
        super().__init__(index)
        self.attn = attention

    def inside(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        return self.attn(x, *more)


class Packed(Quiet):
    """q, k and v in one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(attend(*map(heads, self.qkv(x).chunk(3, -1))))


class ReadsWidth(Packed):
    """Every size is that of the input, or an attribute that no plan speaks of."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.columns = WIDTH // HEAD, WIDTH

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, width = x.size()
        q, k, v = (
            part.view(b, t, self.count, width // self.count).transpose(1, 2)
            for part in self.qkv(x).split(self.columns, 2)
        )
        return self.o(attend(q, k, v).view(b, t, width))


class Mixer(Quiet):
    """A convolution over the positions, which each rank computes whole; a second result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=4)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.conv(F.pad(x.mT, (2, 0))).mT
        return self.out(y.tanh()), y.sum()


class Mixing(MLPLayer):
    """A mixer of positions, then an MLP."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.mixer = Mixer()

    def inside(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        return super().inside(x + self.mixer(x)[0])


class Conditioned(MLPLayer):
    """Scales by what it makes of a vector for each sequence, and gates by the vector itself."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.ada = nn.Linear(WIDTH, WIDTH)

    def inside(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        c = more[0] if more else torch.linspace(-1, 1, WIDTH, dtype=x.dtype).expand(len(x), -1)
        return super().inside(x * (1 + self.ada(c).tanh()[:, None])) * c[:, None]


class Conditions(Stack):
    """Makes the vectors, and hands them to each layer."""

    def __init__(self) -> None:
        super().__init__(Conditioned)
        self.embed = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *more: Any) -> Any:
        return super().forward(x, self.embed(x[:, 0]), *more)


class Inlined(Layer):
    """Attention and an MLP in the layer's own code, which takes sizes from the stream."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.count = WIDTH // HEAD
        self.first, self.second = RMSNorm(WIDTH, 1e-3), RMSNorm(WIDTH, 1e-3)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def inside(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        b, t, _ = x.size()
        y = self.first(x)
        q, k, v = (
            f(y).view(b, t, self.count, HEAD).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        x = x + self.o(attend(q, k, v))
        return self.out(F.gelu(self.fc(self.second(x))))


class Transposed(MLP):
    """The two projections of an MLP, stored (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = Conv1D(WIDTH, INNER), Conv1D(INNER, WIDTH)


class InPlace(MLP):
    """Changes in place what its projections give."""

    def __init__(self) -> None:
        super().__init__(bias=True, out_bias=True)

    def between(self, y: torch.Tensor) -> torch.Tensor:
        return super().between(y.mul_(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sub_(x)


class NormsLayer(Layer):
    """Two kinds of norms, then an MLP."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.first, self.second = nn.LayerNorm(WIDTH), RMSNorm(WIDTH, 10.0 ** -(3 + index))
        self.mlp = MLP()

    def inside(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        return self.mlp(self.second(self.first(x)))


class Normed(Stack):
    """A last norm after the layers."""

    def __init__(self) -> None:
        super().__init__(NormsLayer)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, *more: Any) -> Any:
        return self.norm(super().forward(x))


class NormedHeads(Attention):
    """Every head's q and k are normalised, with one weight for all heads."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.q_norm, self.k_norm = (RMSNorm(HEAD, 10.0 ** -(3 + index)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.q_norm(heads(self.q(x))), self.k_norm(heads(self.k(x)))
        return self.o(attend(q, k, heads(self.v(x))))


class NormedWidth(Attention):
    """q and k are normalised over all heads."""

    def __init__(self, index: int) -> None:
        super().__init__()
        eps = 10.0 ** -(3 + index)
        self.q_norm, self.k_norm = RMSNorm(WIDTH, eps), nn.LayerNorm(WIDTH, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = heads(self.q_norm(self.q(x))), heads(self.k_norm(self.k(x)))
        return self.o(attend(q, k, heads(self.v(x))))


class Parallel(Layer):
    """Attention and MLP side by side, after one norm."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.norm, self.attn, self.mlp = nn.LayerNorm(WIDTH), Attention(), MLP(out_bias=True)

    def inside(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        h = self.norm(x)
        return self.attn(h) + self.mlp(h)


class Sloped(Quiet):
    """Attention with a bias for every head as an argument, and the number of heads in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_heads = WIDTH // HEAD

    def forward(self, x: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.num_heads, 3, HEAD)
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x).view(shape).unbind(-2))
        return self.o(attend(q, k, v, slopes))


class Slopes(Stack):
    """Makes the biases of its attention layers of the positions."""

    def __init__(self) -> None:
        super().__init__(lambda i: AttentionLayer(i, Sloped()))

    def forward(self, x: torch.Tensor, *more: Any) -> Any:
        positions = torch.arange(x.size(1), dtype=x.dtype)
        slopes = 2.0 ** -torch.arange(1, WIDTH // HEAD + 1, dtype=x.dtype)
        return super().forward(x, slopes[:, None, None] * positions)


class Multihead(Layer):
    """torch's own attention, after a norm."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, WIDTH // HEAD, batch_first=True)

    def inside(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        h = self.norm(x)
        return self.attn(h, h, h, need_weights=False)[0]


class ForEachHead(MLP):
    """A norm for each head, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(INNER // 8))

    def between(self, y: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.norms, y.split(8, -1), strict=True)
        return torch.cat([norm(head) for norm, head in pairs], -1)


class Gains(MLP):
    """A factor for each column, a parameter of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(INNER))

    def between(self, y: torch.Tensor) -> torch.Tensor:
        return y.relu() * self.gain


class BareAttention(Quiet):
    """Weights with a dimension for the heads, and a second result."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.empty(3, WIDTH // HEAD, HEAD, WIDTH))
        self.out = nn.Parameter(torch.empty(WIDTH // HEAD, HEAD, WIDTH))
        self.scale, self.shift = (nn.Parameter(torch.empty(n)) for n in (HEAD, WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        q, k, v = torch.einsum("btc,nhdc->nbhtd", x, self.qkv)
        y = attend(q * self.scale, k, v).unflatten(-1, (-1, HEAD))
        return torch.einsum("bthd,hdc->btc", y, self.out) + self.shift, None


class BareMLP(Quiet):
    """Gate and up in one weight, products by ``@`` and ``F.linear``."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.bias = (nn.Parameter(torch.empty(2 * INNER, *n)) for n in ((WIDTH,), ()))
        self.narrow, self.shift = (nn.Parameter(torch.empty(*n, WIDTH)) for n in ((INNER,), ()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, self.wide, self.bias).chunk(2, -1)
        return (gate.sigmoid() * up) @ self.narrow + self.shift


class BareLayer(Layer):
    """Attention and an MLP without a projection."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.attn, self.mlp = BareAttention(), BareMLP()

    def inside(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        return self.mlp(x + self.attn(x)[0])


class AcrossHeads(MLP):
    """A number for each head that comes of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(INNER, INNER // 8)

    def between(self, y: torch.Tensor) -> torch.Tensor:
        factors = self.mix(y).sigmoid().unsqueeze(-1)
        return (y.unflatten(-1, (-1, 8)) * factors).flatten(-2)


class Experts(Quiet):
    """Four gated MLPs in one tensor each, (experts, in, out), gate and up in turns, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.empty(4, WIDTH, 2 * INNER))
        self.bias = nn.Parameter(torch.empty(4, 2 * INNER))
        self.narrow = nn.Parameter(torch.empty(4, INNER, WIDTH))
        self.shift = nn.Parameter(torch.empty(4, WIDTH))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(len(self.wide)):
            rows, places = torch.where(chosen == expert)
            y = x[rows] @ self.wide[expert] + self.bias[expert]
            y = (y[:, ::2].sigmoid() * y[:, 1::2]) @ self.narrow[expert] + self.shift[expert]
            out = out.index_add(0, rows, (y * factors[rows, places, None]).to(out.dtype))
        return out


class HandingThrough(Quiet):
    """Four such MLPs, gate before up, without biases, and two experts that give what they get."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.empty(6, 2 * INNER, WIDTH))
        self.narrow = nn.Parameter(torch.empty(4, WIDTH, INNER))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(len(self.wide)):
            rows, places = torch.where(chosen == expert)
            y = x[rows]
            if expert < len(self.narrow):
                gate, up = F.linear(y, self.wide[expert]).chunk(2, -1)
                y = F.linear(gate.sigmoid() * up, self.narrow[expert])
            out = out.index_add(0, rows, (y * factors[rows, places, None]).to(out.dtype))
        return out


class Mixture(Quiet):
    """Two experts for each token, and an MLP for all of them."""

    def __init__(self, experts: Callable[[], nn.Module] = Experts, count: int = 4) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, count), experts()
        self.shared = MLP(out_bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, x.size(-1))
        factors, chosen = self.router(rows).softmax(-1).topk(2)
        return self.experts(rows, chosen, factors).view_as(x) + self.shared(x)


class Inner(Layer):
    """A layer around any module called ``mlp``."""

    def __init__(self, index: int, mlp: nn.Module) -> None:
        super().__init__(index)
        self.mlp = mlp

    def inside(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        return self.mlp(x)


class Language(Stack):
    """Tokens to logits, and their cross entropy where there are labels."""

    def __init__(self, tied: bool) -> None:
        super().__init__(MLPLayer)
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor, *more: Any, labels: torch.Tensor | None = None) -> Any:
        logits = self.end(self.norm(super().forward(self.start(x))))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits

    def start(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids)

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


class Lending(Language):
    """Logits of the embedding's own table, which the model's code reads."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        del self.head

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tokens.weight.T


class Positioned(Language):
    """Learned positions, and parameters and a projection beside the layers."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.positions = nn.Embedding(32, WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.project = nn.Linear(WIDTH, WIDTH)

    def start(self, ids: torch.Tensor) -> torch.Tensor:
        x = super().start(ids) + self.positions(torch.arange(ids.size(1)))
        return self.project(x + self.shift)


MLP_RULES = {"layers.*.mlp.fc": "colwise", "layers.*.mlp.out": "rowwise"}
ATTENTION_RULES = {"layers.*.attn.{q,k,v}": "colwise", "layers.*.attn.o": "rowwise"}
ENDS = {"tokens": "vocab", "norm": "sequence_parallel", "head": "vocab"}
FIRST = "layers.0"
MLP_ALONE = (FIRST, f"{FIRST}.mlp")
ATTENTION_ALONE = (FIRST, f"{FIRST}.attn")
LANGUAGE_ALONE = (*MLP_ALONE, "tokens", "norm", "head")


def _mlp(make: Callable[[], nn.Module], **rules: Any) -> Block:
    more = {f"layers.*.mlp.{name}": rule for name, rule in rules.items()}
    return Block(
        lambda: Stack(lambda i: Inner(i, make())),
        {**MLP_RULES, **more},
        MLP_ALONE,
        (f"{FIRST}.mlp.fc",),
    )


def _attention(make: Callable[[int], nn.Module], parts: str = "q", **rules: Any) -> Block:
    more = {f"layers.*.attn.{name}": rule for name, rule in rules.items()}
    return Block(
        lambda: Stack(lambda i: AttentionLayer(i, make(i))),
        {**ATTENTION_RULES, **more},
        ATTENTION_ALONE,
        tuple(f"{FIRST}.attn.{part}" for part in parts),
    )


BLOCKS: Mapping[str, Block] = {
    "whole experts": Block(
        lambda: Stack(lambda i: Inner(i, Mixture())),
        {
            "layers.*.mlp.router": "replicate",
            "layers.*.mlp.experts": {"style": "experts", "shard": "experts"},
            "layers.*.mlp.shared.fc": "colwise",
            "layers.*.mlp.shared.out": "rowwise",
        },
        MLP_ALONE,
    ),
    "experts": Block(
        lambda: Stack(lambda i: Inner(i, Mixture())),
        {
            "layers.*.mlp.router": "replicate",
            "layers.*.mlp.experts": "experts",
            "layers.*.mlp.shared.fc": "colwise",
            "layers.*.mlp.shared.out": "rowwise",
        },
        MLP_ALONE,
    ),
    "experts that hand tokens through": Block(
        lambda: Stack(lambda i: Inner(i, Mixture(HandingThrough, 6))),
        {
            "layers.*.mlp.router": "replicate",
            "layers.*.mlp.experts": "experts",
            "layers.*.mlp.shared.fc": "colwise",
            "layers.*.mlp.shared.out": "rowwise",
        },
        MLP_ALONE,
    ),
    "colwise and rowwise": _mlp(MLP),
    "biases": _mlp(InPlace),
    "transposed": _mlp(Transposed),
    "packed": Block(
        lambda: Stack(lambda i: AttentionLayer(i, Packed())),
        {
            "layers.*.attn.qkv": {"style": "colwise", "packed": ["q", "k", "v"]},
            "layers.*.attn.o": "rowwise",
        },
        ATTENTION_ALONE,
    ),
    "width of its input": Block(
        lambda: Stack(lambda i: AttentionLayer(i, ReadsWidth())),
        {
            "layers.*.attn.qkv": {"style": "colwise", "packed": ["q", "k", "v"]},
            "layers.*.attn.o": "rowwise",
        },
        ATTENTION_ALONE,
    ),
    "whole sequence": Block(
        lambda: Stack(Mixing),
        {**MLP_RULES, "layers.*.mixer": {"style": "replicate", "input": "gather"}},
        (*MLP_ALONE, f"{FIRST}.mixer"),
    ),
    "a condition for all rows": Block(
        Conditions,
        {**MLP_RULES, "layers.*.ada": "replicate", "embed": "replicate"},
        MLP_ALONE,
    ),
    "in the layers' own code": Block(
        lambda: Stack(Inlined),
        {
            "layers.*.{first,second}": "sequence_parallel",
            "layers.*.{q,k,v,fc}": "colwise",
            "layers.*.{o,out}": "rowwise",
        },
        (FIRST, f"{FIRST}.first"),
        (f"{FIRST}.q",),
        layers="layers.*.{first,second}",
    ),
    "shared key-value heads": _attention(lambda i: Attention(2 * HEAD)),
    "vocabulary": Block(
        lambda: Language(tied=False), {**MLP_RULES, **ENDS}, LANGUAGE_ALONE, call=tokens
    ),
    "tied vocabulary": Block(
        lambda: Language(tied=True), {**MLP_RULES, **ENDS}, LANGUAGE_ALONE, call=tokens
    ),
    "replicated weights that others read": Block(
        Lending,
        {**MLP_RULES, "tokens": "replicate", "norm": "sequence_parallel"},
        (*MLP_ALONE, "tokens", "norm"),
        call=tokens,
    ),
    "around the layers": Block(
        Positioned,
        {
            **MLP_RULES,
            **ENDS,
            "positions": "sequence_parallel",
            "shift": "replicate",
            "project": "replicate",
        },
        (*LANGUAGE_ALONE, "positions", "project"),
        call=tokens,
    ),
    "norms on the stream": Block(
        Normed,
        {**MLP_RULES, "layers.*.{first,second}": "sequence_parallel", "norm": "sequence_parallel"},
        (*MLP_ALONE, f"{FIRST}.first", f"{FIRST}.second", "norm"),
    ),
    "norm of each head": _attention(NormedHeads, **{"{q,k}_norm": "replicate"}),
    "norm of the width": _attention(NormedWidth, **{"{q,k}_norm": "colwise"}),
    "reduced together": Block(
        lambda: Stack(Parallel),
        {**MLP_RULES, **ATTENTION_RULES, "layers.*.norm": "sequence_parallel"},
        (*MLP_ALONE, f"{FIRST}.attn", f"{FIRST}.norm"),
    ),
    "attributes and inputs of heads": Block(
        Slopes,
        {
            "layers.*.attn": {
                "style": "attention",
                "heads": "num_heads",
                "attributes": {"num_heads": "heads"},
                "head_inputs": {"slopes": 0},
            },
            "layers.*.attn.qkv": {
                "style": "colwise",
                "packed": {"parts": ["q", "k", "v"], "repeat": "heads"},
            },
            "layers.*.attn.o": "rowwise",
        },
        ATTENTION_ALONE,
    ),
    "torch's attention": Block(
        lambda: Stack(Multihead),
        {"layers.*.attn": "attention", "layers.*.norm": "sequence_parallel"},
        (FIRST, f"{FIRST}.norm", f"{FIRST}.attn"),
    ),
    "a module for each head": _mlp(ForEachHead, norms="colwise"),
    "bare parameter": _mlp(Gains, gain="colwise"),
    "bare matrices": Block(
        lambda: Stack(BareLayer),
        {
            "layers.*.attn.qkv": {"style": "colwise", "dim": 1},
            "layers.*.attn.out": {"style": "rowwise", "dim": 0},
            "layers.*.attn.{scale,shift}": "replicate",
            "layers.*.mlp.{wide,bias}": {"style": "colwise", "packed": ["gate", "up"]},
            "layers.*.mlp.narrow": {"style": "rowwise", "dim": -2},
        },
        (FIRST, f"{FIRST}.attn", f"{FIRST}.mlp"),
    ),
    "a number for each head": _mlp(AcrossHeads, mix={"style": "rowwise", "output": "shard"}),
}


def built(block: Block, seed: int = 0) -> nn.Module:
    """The model with random numbers in every parameter, none of them zero or one throughout."""
    torch.manual_seed(seed)
    model = block.make()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 1.0 if parameter.dim() == 1 else 0.0
            parameter.normal_(mean, 0.3, generator=generator)
    return model
