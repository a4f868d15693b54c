"""torch's own transformer layers, whose attention reads the weights of layers it never calls."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tpplan
from tests.compare import Findings, beyond, error, step
from tests.models import randomize, weights_like
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tpplan.compat import simulate
from tpplan.rewrite import apply

WIDTH, HEADS, VOCAB = 64, 8, 131
LAYER = {
    "{self,multihead}_attn": "attention",
    "norm?": "sequence_parallel",
    "linear1": "colwise",
    "linear2": "rowwise",
}


def plan(stack: str, **more: str) -> dict[str, Any]:
    rules = {f"{stack}.layers.*.{name}": style for name, style in LAYER.items()}
    return {"tpplan": 1, "rules": {**rules, **more}}


class Encoder(nn.Module):
    """Embeddings, ``nn.TransformerEncoder``, head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 96, 0.0, activation="gelu", **options)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.first = options.get("batch_first", False)
        randomize(self, 3)

    def forward(self, ids: torch.Tensor, **masks: Any) -> torch.Tensor:
        x = self.embedding(ids)
        x = self.encoder(x if self.first else x.transpose(0, 1), **masks)
        return self.head(x if self.first else x.transpose(0, 1))


ENCODER = plan(
    "encoder",
    embedding="vocab",
    head="vocab",
    **{"encoder.norm": "sequence_parallel"},
)


def masks() -> dict[str, dict[str, Any]]:
    causal = nn.Transformer.generate_square_subsequent_mask(13)
    padding = torch.zeros(2, 13, dtype=torch.bool)
    padding[1, 9:] = True
    each = torch.randn(2 * HEADS, 13, 13, generator=torch.Generator().manual_seed(1))
    return {
        "no mask": {},
        "causal": {"mask": causal, "is_causal": True},
        "padding": {"src_key_padding_mask": padding},
        "both": {"mask": causal, "src_key_padding_mask": padding.float() * -1e9},
        "for every head": {"mask": each},
    }


def encoder_job(mesh: DeviceMesh, sp: bool) -> dict[str, float]:
    found = Findings()
    ids = torch.randint(0, VOCAB, (2, 13), generator=torch.Generator().manual_seed(7))
    variants: list[dict[str, Any]] = [
        {"batch_first": True},
        {"batch_first": True, "norm_first": True},
        {"batch_first": True, "bias": False},
    ]
    for options in variants if sp else [*variants, {}]:
        reference = Encoder(**options)
        model = copy.deepcopy(reference)
        tpplan.parallelize(model, ENCODER, mesh, sp, inputs=ids)
        for name, mask in masks().items():
            if options != variants[0] and name != "both":
                continue

            def run(m: nn.Module, mask: dict[str, Any] = mask) -> dict[str, torch.Tensor]:
                y = m(ids, **mask)
                return {"y": y, "objective": (y * weights_like(y, 1)).sum()}

            with found.case(f"{options}, {name}"):
                found.add(f"{options}, {name}", step(reference, model, run))
                if name == "for every head":
                    continue  # torch's fused layer gives NaN for such a mask
                for m in (reference, model):
                    m.eval()  # without gradients torch runs whole layers as one op
                with torch.no_grad():
                    whole, ours = reference(ids, **mask), model(ids, **mask)
                kept = ~mask.get("src_key_padding_mask", torch.zeros(2, 13)).bool()
                found.add(f"{options}, {name}, fused", error(whole[kept], ours[kept]))
                for m in (reference, model):
                    m.train()
    return found.errors


@SIZES
@MODES
def test_encoder(ranks: Ranks, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, encoder_job, sp))


class Decoder(nn.Module):
    """``nn.TransformerDecoder``: self-attention and attention to a memory."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 96, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        randomize(self, 4)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return self.decoder(x, memory)


def test_decoder() -> None:
    inputs = (torch.randn(2, 13, WIDTH), torch.randn(2, 7, WIDTH))
    rules = plan("decoder")
    result = tpplan.verify(Decoder, rules, 4, sequence_parallel=False, inputs=inputs)
    # self-attention, attention to the memory, MLP; the memory is no parameter's, and needs none
    assert result.counts["forward"]["all_reduce"] == 6


class Attending(nn.Module):
    """Attention to a memory of another width; gives its weights too."""

    def __init__(self, width: int | None, first: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        sizes = {"kdim": width, "vdim": width}
        self.attend = nn.MultiheadAttention(WIDTH, HEADS, batch_first=first, **sizes)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, padding: torch.Tensor) -> Any:
        y, weights = self.attend(self.norm(x), memory, memory, key_padding_mask=padding)
        return x + y, weights


class Reader(nn.Module):
    """Gives out where its layers looked."""

    def __init__(self, width: int | None, first: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attending(width, first) for _ in range(2))
        randomize(self, 5)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, padding: torch.Tensor) -> Any:
        read = []
        for layer in self.layers:
            x, weights = layer(x, memory, padding)
            read.append(weights)
        return x, torch.stack(read)


@pytest.mark.parametrize("width", [None, 24])
@pytest.mark.parametrize("first", [True, False])
def test_weights_that_the_model_uses(width: int | None, first: bool) -> None:
    def make() -> nn.Module:
        return Reader(width, first)

    memory, padding = torch.randn(2, 7, width or WIDTH), torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    x = torch.randn(2, 13, WIDTH)
    if not first:
        x, memory = x.transpose(0, 1).contiguous(), memory.transpose(0, 1).contiguous()
    rules = {"layers.*.norm": "sequence_parallel", "layers.*.attend": "attention"}
    written = {"tpplan": 1, "sequence_parallel": False, "rules": rules}
    tpplan.verify(make, written, 4, inputs=(x, memory, padding))


def test_attention_weights() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)])

        def forward(self, x: torch.Tensor) -> Any:
            return self.layers[0](x, x, x)

    torch.manual_seed(0)
    reference, x = Alone(), torch.randn(2, 13, WIDTH)
    expected, weights = reference(x)
    rules = {"tpplan": 1, "rules": {"layers.*": "attention"}, "sequence_parallel": False}

    def job(mesh: DeviceMesh) -> tuple[float, float]:
        model = copy.deepcopy(reference)
        tpplan.parallelize(model, rules, mesh, inputs=x, prove=False)
        ours, own = model(x)
        with pytest.raises(ValueError, match="attention weights of its own heads"):
            model.layers[0](x, x, x, average_attn_weights=False)
        model.layers[0].out_proj = nn.Linear(WIDTH, WIDTH)
        with pytest.raises(RuntimeError, match=r"layers\.0\.out_proj is Linear, put there after"):
            model(x)
        return error(expected, ours), error(weights, own)

    assert all(max(errors) <= 1e-5 for errors in simulate(2, job))


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(tpplan.PlanError, match="tp may be 1, 2, 4, 8"):
        ids = torch.zeros(2, 8, dtype=torch.long)
        tpplan.check(Encoder(batch_first=True), ENCODER, 3, inputs=ids)


ROOT = {
    "layers.*.self_attn": "attention",
    "layers.*.linear1": "colwise",
    "layers.*.linear2": "rowwise",
    "layers.*.{norm1,norm2}": "sequence_parallel",
}


def test_a_model_that_is_torchs_encoder_itself() -> None:
    """In evaluation, with a mask, it would run fused code that reads whole weights."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
    reference = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 6, 16)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    compiled = tpplan.check(reference, {"tpplan": 1, "rules": ROOT}, 2, False, inputs=(x,))
    assert compiled.modules[""].attributes["use_nested_tensor"] == (True, 0)

    def job(mesh: DeviceMesh) -> float:
        model = apply(copy.deepcopy(reference), compiled, mesh)
        with torch.no_grad():
            out = model(x, src_key_padding_mask=padding)
            return error(reference(x, src_key_padding_mask=padding)[~padding], out[~padding])

    assert max(simulate(2, job)) < 1e-5
