"""Plans for the diffusion transformers of diffusers: suggested, or by hand where that is better.

Needs diffusers (``pip install diffusers``). Each is built small, with random weights, as its class
is; its plan is verified at tp 2 in TP and TP+SP. The table is kept: a run adds to it the models
that it was asked for, and without any those that it has not.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

import tpplan
from benchmarks.common import kept_rows, markdown
from benchmarks.coverage import reason_of

RESULTS = Path(__file__).parent / "results" / "diffusion.md"
HEADS = ("model", "plan", "rules", "TP: error", "on a rank", "TP+SP: error", "seconds")
_MASK = torch.ones(2, 6, dtype=torch.bool)
Made = tuple[Any, dict[str, Any]]
# blocks of two streams, then of both in one, which project attention and MLP together
_JOINT = """
tpplan: 1
sequence_parallel: false
rules:
  "{x_embedder,context_embedder,time_text_embed,norm_out,proj_out}": replicate
  transformer_blocks.*.{norm1,norm1_context}: replicate
  single_transformer_blocks.*.norm: replicate
  "{transformer_blocks,single_transformer_blocks}.*.attn.to_{q,k,v}": colwise
  transformer_blocks.*.attn.add_{q,k,v}_proj: colwise
  transformer_blocks.*.attn.{to_out.0,to_add_out}: rowwise
  transformer_blocks.*.{ff,ff_context}.net.0.proj: colwise
  transformer_blocks.*.{ff,ff_context}.net.2: rowwise
  single_transformer_blocks.*.proj_mlp: colwise
"""

# where suggest leaves attention whole, or products over two things of different widths
BY_HAND = {
    "Flux": f"""{_JOINT}
  single_transformer_blocks.*.proj_out: {{style: rowwise, packed: {{attn: [64, 1], mlp: [256, 1]}}}}
""",
    "HunyuanVideo": f"""{_JOINT}
  "{{transformer_blocks,single_transformer_blocks}}.*.attn":
    style: attention
    attributes: {{heads: heads}}
  single_transformer_blocks.*.proj_out: {{style: rowwise, packed: {{attn: [40, 1], mlp: [160, 1]}}}}
""",
    "Wan": """
tpplan: 1
rules:
  scale_shift_table: replicate
  "{patch_embedding,condition_embedder,norm_out,proj_out}": replicate
  blocks.*.scale_shift_table: replicate
  blocks.*.norm{1,2,3}: sequence_parallel
  blocks.*.attn{1,2}: {style: attention, attributes: {heads: heads}}
  blocks.*.attn{1,2}.{to,norm}_{q,k}: colwise
  blocks.*.attn{1,2}.to_v: colwise
  blocks.*.attn{1,2}.to_out.0: rowwise
  blocks.*.ffn.net.0.proj: colwise
  blocks.*.ffn.net.2: rowwise
""",
}


def _drawn(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def _text(width: int = 16) -> torch.Tensor:
    return _drawn(2, 6, width)


def models() -> dict[str, Callable[[], Made]]:
    """By name, what makes a small one and a call."""
    all_ = importlib.import_module("diffusers")
    heads = {"num_attention_heads": 4, "num_layers": 2}
    image = {"sample_size": 8, "patch_size": 2, "in_channels": 4}
    steps, shares = torch.tensor([1, 5]), torch.tensor([0.1, 0.7])
    latents, tokens = {"hidden_states": _drawn(2, 4, 8, 8)}, {"hidden_states": _drawn(2, 16, 16)}

    def of(name: str, options: dict[str, Any], call: dict[str, Any]) -> Callable[[], Made]:
        def make() -> Made:
            torch.manual_seed(0)
            return getattr(all_, name)(**options), {**call, "return_dict": False}

        return make

    flux = {
        **heads, "patch_size": 1, "in_channels": 16, "num_single_layers": 2,
        "guidance_embeds": True, "attention_head_dim": 16, "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": [4, 6, 6],
    }  # fmt: skip
    where = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3), "guidance": shares}
    sd3 = {
        **heads, **image, "attention_head_dim": 8, "caption_projection_dim": 32,
        "joint_attention_dim": 32, "pooled_projection_dim": 32, "out_channels": 4,
        "pos_embed_max_size": 16,
    }  # fmt: skip
    pixart = {**heads, **image, "attention_head_dim": 8, "out_channels": 8, "caption_channels": 16}
    pixart |= {"cross_attention_dim": 32, "use_additional_conditions": False}
    wan = {
        **heads, "patch_size": (1, 2, 2), "attention_head_dim": 12, "in_channels": 4,
        "out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 64, "rope_max_seq_len": 32,
    }  # fmt: skip
    hunyuan = {
        **heads, "in_channels": 4, "out_channels": 4, "attention_head_dim": 10,
        "num_single_layers": 2, "num_refiner_layers": 1, "patch_size": 1, "patch_size_t": 1,
        "text_embed_dim": 16, "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4),
    }  # fmt: skip
    qwen = {
        **heads, "patch_size": 2, "in_channels": 16, "out_channels": 4, "attention_head_dim": 16,
        "joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4),
    }  # fmt: skip
    lumina = {
        **image, **heads, "hidden_size": 32, "num_refiner_layers": 1, "num_kv_heads": 2,
        "multiple_of": 16, "axes_dim_rope": (4, 2, 2), "axes_lens": (32, 32, 32),
        "cap_feat_dim": 16,
    }  # fmt: skip
    text = {"encoder_hidden_states": _text()}
    wide = {"encoder_hidden_states": _text(32), "pooled_projections": _drawn(2, 32)}
    seen = {"encoder_hidden_states_mask": _MASK, "img_shapes": [[(1, 4, 4)]] * 2}
    conditions = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
    video = {"hidden_states": _drawn(2, 4, 2, 8, 8), **text, "timestep": steps}
    masked = {"encoder_attention_mask": torch.ones(2, 6), "pooled_projections": _drawn(2, 8)}
    masked |= {"guidance": 1000 * shares}
    dit = {**heads, **image, "attention_head_dim": 8, "num_embeds_ada_norm": 8}
    labels = {"timestep": steps, "class_labels": steps}
    return {
        "DiT": of("DiTTransformer2DModel", dit, latents | labels),
        "PixArt": of(
            "PixArtTransformer2DModel", pixart, latents | text | {"timestep": steps} | conditions
        ),
        "SD3": of("SD3Transformer2DModel", sd3, latents | wide | {"timestep": shares}),
        "Flux": of("FluxTransformer2DModel", flux, tokens | wide | where | {"timestep": shares}),
        "Wan": of("WanTransformer3DModel", wan, video),
        "HunyuanVideo": of("HunyuanVideoTransformer3DModel", hunyuan, video | masked),
        "QwenImage": of(
            "QwenImageTransformer2DModel", qwen, tokens | text | seen | {"timestep": shares}
        ),
        "Lumina 2": of(
            "Lumina2Transformer2DModel",
            lumina,
            latents | text | {"timestep": shares, "encoder_attention_mask": _MASK},
        ),
    }


def examine(name: str, make: Callable[[], Made]) -> tuple[str, ...]:
    """The row of one model."""
    start = time.perf_counter()
    model, call = make()
    try:
        plan = (
            tpplan.load_plan(yaml.safe_load(BY_HAND[name]))
            if name in BY_HAND
            else tpplan.suggest(model, 2, call)
        )
    except Exception as error:
        return name, "suggested", "", f"refused: {reason_of(error)}", "", "", _since(start)
    cells, share = [], ""
    for mode in (False, True):
        try:
            found = tpplan.verify(model, plan, 2, sequence_parallel=mode, inputs=call)
        except Exception as error:
            cells.append(reason_of(error))
        else:
            cells.append(f"{found.gradient_error:.0e}")
            share = share or f"{found.rank_share:.0%}"
    how = "by hand" if name in BY_HAND else "suggested"
    return name, how, str(len(plan.rules)), cells[0], share, cells[1], _since(start)


def _since(start: float) -> str:
    return f"{time.perf_counter() - start:.0f}"


def main() -> int:
    """Examine, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only these, separated by commas, anew")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, makers = kept_rows(RESULTS, HEADS), models()
    asked = [name for name in options.only.split(",") if name]
    for name in asked or [name for name in makers if name not in rows]:
        row = examine(name, makers[name])
        rows[name] = tuple(cell.replace("|", "/") for cell in row)
        print(" | ".join(rows[name]), flush=True)
        ordered = [rows[known] for known in makers if known in rows]
        RESULTS.write_text(f"{_HEAD}\n\n{markdown(HEADS, ordered)}\n")
    return 0


_HEAD = f"""# Diffusion transformers

`python -m benchmarks.diffusion`, torch {torch.__version__}.

Small models of diffusers' classes with random weights. A plan is suggested at tp 2 without a line
by hand, or is the one that the script has; whole against sharded at tp 2, in float32: the worst
error of all gradients, of the inputs' too, and the share of the parameters on a rank."""


if __name__ == "__main__":
    sys.exit(main())
