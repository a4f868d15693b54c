"""Checkpoints of unsharded models, read by ranks: the numbers, and how many bytes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import tpplan
from tests.checkpoint.folders import shared_folder
from tests.compare import Errors, Findings, beyond, compare_parameters, full, same, step
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.rewrite.rows import CASES, built, labelled
from tpplan.checkpoint.files import Stored
from tpplan.checkpoint.load import load_checkpoint
from tpplan.checkpoint.parts import chunks_of
from tpplan.checkpoint.read import part_of, runs


def loading_job(mesh: DeviceMesh, sp: bool, case: str) -> Errors:
    """A model on meta, sharded, filled from what transformers saved: values, a step, bytes."""
    found, folder = Findings(), shared_folder(mesh.get_group())
    reference = built(case)
    if mesh.get_local_rank() == 0:
        reference.save_pretrained(folder, max_shard_size="20KB")
    dist.barrier(group=mesh.get_group())
    model = built(case, device="meta")
    tpplan.parallelize(model, CASES[case][0], mesh, sequence_parallel=sp, prove=False)
    loaded = load_checkpoint(model, folder)
    found.add("values", compare_parameters(reference, model))
    found.add("buffers", same(all(map(torch.equal, reference.buffers(), model.buffers()))))
    found.add("step", step(reference, model, labelled(2, 9, 1)))
    held = {id(t): t for t in model.state_dict(keep_vars=True).values()}.values()
    own = sum(chunk.nbytes for t in held for _, chunk in chunks_of(t))
    found.add("bytes", same(loaded.bytes_read == own))
    found.add("again", same(load_checkpoint(model, folder) == loaded))
    found.add("values again", compare_parameters(reference, model))
    return found.errors


@SIZES
@MODES
@pytest.mark.parametrize("case", CASES)
def test_loading(ranks: Ranks, case: str, tp: int, sp: bool) -> None:
    assert not beyond(ranks.run(tp, loading_job, sp, case))


def with_fsdp_job(mesh: DeviceMesh, case: str) -> Errors:
    """Two replicas of two ranks, whose parameters FSDP2 cut further."""
    found = Findings()
    folder = shared_folder()
    reference = built(case)
    if dist.get_rank() == 0:
        reference.save_pretrained(folder)
    dist.barrier()
    model = built(case, seed=2)
    tpplan.parallelize(model, CASES[case][0], mesh["tp"], prove=False)
    fully_shard(model, mesh=mesh["dp"])
    load_checkpoint(model, folder)
    for name, parameter in reference.named_parameters():
        whole = full(model.get_parameter(name))
        found.add(name, same(torch.equal(parameter, whole)))
    return found.errors


@pytest.mark.parametrize("case", ["gpt2", "llama 1"])
def test_with_fsdp(ranks: Ranks, case: str) -> None:
    assert not beyond(ranks.run("2x2", with_fsdp_job, case))


# --- without ranks


class Small(nn.Module):
    """Two layers, a tie, a buffer that is saved and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(4, 6, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("mean", torch.arange(3.0))
        self.register_buffer("count", torch.tensor(7))


def saved(folder: Path, model: nn.Module, **changed: torch.Tensor | None) -> Path:
    """A file of a model's tensors, some of them others, or left out."""
    tensors = {**model.state_dict(), **changed}
    del tensors["last.weight"]
    kept = {n: t.clone() for n, t in tensors.items() if t is not None}
    save_file(kept, folder / "model.safetensors")
    return folder / "model.safetensors"


def test_a_plain_model(tmp_path: Path) -> None:
    path = saved(tmp_path, reference := Small())
    with torch.device("meta"):
        model = Small()
    loaded = load_checkpoint(model, path)
    assert model.last.weight is model.first.weight and loaded.tensors == 4
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in reference.state_dict().items())


def test_numbers_are_converted(tmp_path: Path) -> None:
    path = saved(tmp_path, reference := Small())
    model = Small().to(torch.bfloat16)
    load_checkpoint(model, tmp_path)
    assert torch.equal(model.first.weight, reference.first.weight.bfloat16())
    assert model.count == 7 and path.exists()


def test_everything_that_is_wrong_is_said(tmp_path: Path) -> None:
    changed = {
        "first.weight": torch.zeros(6, 5),
        "first.bias": None,
        "count": torch.tensor(7.0),
        "more": torch.zeros(2),
    }
    path = saved(tmp_path, Small(), **changed)
    model = Small()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(tpplan.CheckpointError) as caught:
        load_checkpoint(model, path)
    assert caught.value.problems == (
        "another dtype: count is torch.float32, the model's is torch.int64",
        "another shape: first.weight is (6, 5), the model's is (6, 4)",
        "missing: first.bias (6,)",
        "unexpected: more (2,)",
    )
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_one_tensor_of_the_model_and_two_of_the_file(tmp_path: Path) -> None:
    reference = Small()
    tensors = {n: t.clone() for n, t in reference.state_dict().items()}
    save_file(
        {n: t.to(torch.float8_e4m3fn) for n, t in tensors.items() if n != "count"}
        | {"count": tensors["count"]},
        tmp_path / "float8",
    )
    load_checkpoint(Small(), tmp_path / "float8")
    save_file(tensors, tmp_path / "both")
    load_checkpoint(model := Small(), tmp_path / "both")
    assert torch.equal(model.last.weight, reference.first.weight)
    tensors["last.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "others")
    with pytest.raises(tpplan.CheckpointError) as caught:
        load_checkpoint(model, tmp_path / "others", strict=False)
    (problem,) = caught.value.problems
    assert problem.startswith("two for one: first.weight and last.weight differ, and the model has")
    assert torch.equal(model.last.weight, reference.first.weight)


def test_what_is_left_out(tmp_path: Path) -> None:
    path = saved(tmp_path, reference := Small(), **{"first.bias": None, "more": torch.zeros(2)})
    model = Small()
    before = model.first.bias.clone()
    with pytest.warns(UserWarning, match="(?s)loaded but for.*missing: first.bias .*unexp.*: more"):
        load_checkpoint(model, path, strict=False)
    assert torch.equal(model.first.bias, before)
    assert torch.equal(model.first.weight, reference.first.weight)
    with torch.device("meta"):
        blank = Small()
    with pytest.raises(tpplan.CheckpointError, match=r"no values: first\.bias is on the meta"):
        load_checkpoint(blank, path, strict=False)


GPT2, LLAMA, BART = (
    {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 31},
    {**CASES["llama 2"][2], "num_hidden_layers": 1},
    {
        "d_model": 16,
        "vocab_size": 31,
        **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 16 for side in ("encoder", "decoder")},
    },
)
MASK = {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8)}
FREQUENCIES = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
VERSION = {"model.encoder.version": torch.ones(1)}


@pytest.mark.parametrize(
    ("kind", "sizes", "more", "less"),
    [
        ("GPT2LMHead", GPT2, MASK, ""),
        ("LlamaForCausalLM", LLAMA, FREQUENCIES, ""),
        ("BartForConditionalGeneration", BART, VERSION, "final_logits_bias"),
    ],
)
def test_what_transformers_knows_of_its_files(
    tmp_path: Path, kind: str, sizes: dict[str, int], more: dict[str, torch.Tensor], less: str
) -> None:
    import transformers

    cls = getattr(transformers, f"{kind}Model" if kind.endswith("Head") else kind)
    reference = cls(cls.config_class(**sizes))
    reference.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    held = {n: t for n, t in load_file(path).items() if n != less}
    save_file({**held, **more}, path, {"format": "pt"})
    model = tpplan.from_pretrained(tmp_path, prove=False)
    state = model.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in reference.state_dict().items())


def test_a_buffer_without_values(tmp_path: Path) -> None:
    path = saved(tmp_path, Small())
    with torch.device("meta"):
        model = Small()
        model.register_buffer("table", torch.zeros(3), persistent=False)
    with pytest.raises(tpplan.CheckpointError, match="the buffer table is on the meta device"):
        load_checkpoint(model, path)
    assert model.first.weight.is_meta


def test_a_base_model_and_one_with_a_head(tmp_path: Path) -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    whole = transformers.BertForMaskedLM(config)
    save_file({n: p.clone() for n, p in whole.bert.state_dict().items()}, tmp_path / "base")
    base = transformers.BertModel(config, add_pooling_layer=False)
    load_checkpoint(base, tmp_path / "base")
    prefixed = {f"bert.{n}": p.clone() for n, p in whole.bert.state_dict().items()}
    save_file(prefixed, tmp_path / "prefixed")
    other = transformers.BertModel(config, add_pooling_layer=False)
    load_checkpoint(other, tmp_path / "prefixed")
    for model in (base, other):
        for name, parameter in whole.bert.named_parameters():
            assert torch.equal(parameter, model.get_parameter(name))


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [
        ((0, 0, 0), (3, 4, 5)),
        ((1, 0, 0), (2, 4, 5)),
        ((0, 1, 0), (3, 2, 5)),
        ((2, 1, 3), (1, 3, 2)),
    ],
)
def test_parts(tmp_path: Path, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    whole = torch.randn(3, 4, 5)
    file = tmp_path / "numbers"
    file.write_bytes(b"12345678" + whole.numpy().tobytes())
    stored = Stored(file, torch.float32, (3, 4, 5), 8)
    block = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    assert torch.equal(part_of(stored, offsets, sizes), whole[block])
    lengths = [length for _, length in runs(stored, offsets, sizes)]
    assert sum(lengths) == 4 * math.prod(sizes)
    assert len(lengths) == (1 if offsets[1:] == (0, 0) else 3)
