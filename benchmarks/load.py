"""Loading a safetensors checkpoint onto the ranks: bytes read, memory, seconds; and saving it.

``python -m benchmarks.load``: a Llama in bfloat16 is written to a folder, and read by gloo ranks.
Beside tpplan, on the same files: transformers' own loader with its ``tp_plan``, and the whole model
on every rank (which maps the files, and reads what is used when it is). A new model of the config,
in float32, has no files; one whole tensor at a time is made for it.
Memory is what the process has at most while it loads, above what it had before;
both in shares of what a rank has to hold. The files are read once before, so that all of them find
them in memory.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

import tpplan
from benchmarks.common import on_ranks, option_parser, parse
from tpplan.checkpoint.load import load_checkpoint
from tpplan.checkpoint.parts import chunks_of

SIZES: Mapping[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "dtype": torch.bfloat16,
}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "num_hidden_layers": 2}
LAYER = 2 * (2048 * 2048 * 2 + 2 * 2048 * 256 + 3 * 2048 * 5632)  # bytes
# of what a rank holds: bytes that may be read for it, and memory that it may take
BYTES, MEMORY = 1.02, 1.1


def config_of(gigabytes: float) -> Any:
    """As many layers as make the model so large."""
    layers = max(2, round((gigabytes * 1e9 - 4 * 32000 * 2048) / LAYER))
    return transformers.LlamaConfig(**SIZES, num_hidden_layers=layers)


def write(config: Any, folder: str) -> None:
    """An unsharded model of random numbers."""
    torch.set_default_dtype(config.dtype)
    model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)


def by_tpplan(folder: str) -> tuple[Any, int]:
    """Built on meta, sharded, filled."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(config.dtype)
    tpplan.parallelize(model, "llama.yaml", mesh, prove=False)
    return model, load_checkpoint(model, folder).bytes_read


def new(folder: str) -> tuple[Any, int]:
    """No files: a new model of the config, its values a tensor at a time."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    config = transformers.AutoConfig.from_pretrained(folder)
    return tpplan.from_pretrained(config, "llama.yaml", mesh, prove=False), 0


def by_transformers(folder: str) -> tuple[Any, int]:
    """With the tensor parallelism of transformers."""
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, tp_plan="auto", dtype=torch.bfloat16), 0


def whole(folder: str) -> tuple[Any, int]:
    """All of it on every rank."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), 0


WAYS: Mapping[str, Callable[[str], tuple[Any, int]]] = {
    "tpplan": by_tpplan,
    "tpplan, a new model": new,
    "transformers, tp_plan": by_transformers,
    "transformers, whole": whole,
}


def resident(what: str) -> int:
    """Bytes of this process that are in memory: VmRSS, or VmHWM, the most there ever were."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {what} in /proc/self/status")


def measured(way: str, folder: str) -> dict[str, float]:
    """On one rank, the worst of all ranks; what is imported for it is there before."""
    WAYS[way](f"{folder}-small")
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the most from now on
    dist.barrier()
    start = time.perf_counter()
    model, read = WAYS[way](folder)
    seconds = time.perf_counter() - start
    peak = resident("VmHWM") - before
    held = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    own = sum(local.nbytes for t in held for _, local in chunks_of(t))
    slices = max(local.nbytes for t in held for _, local in chunks_of(t))
    tensor = max(t.numel() * t.element_size() for t in held)
    found = {"own": own, "read": read, "peak": peak, "seconds": seconds, "slice": slices}
    found["tensor"] = tensor
    if way == "tpplan":
        with tempfile.TemporaryDirectory(dir=Path(folder).parent) as other:
            told = [other]
            dist.broadcast_object_list(told, src=0)
            dist.barrier()
            start = time.perf_counter()
            tpplan.save_checkpoint(model, Path(told[0]) / "saved")
            found["save"] = time.perf_counter() - start
            dist.barrier()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return {key: max(one[key] for one in everyone) for key in found}


def main() -> int:
    """Print a line for each loader."""
    parser = option_parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--tp", type=int, default=4)
    options = parse(parser)
    missed, figures = False, {}
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(options.gigabytes)
        write(transformers.LlamaConfig(**{**SIZES, **SMALL}), f"{folder}/model-small")
        write(config, f"{folder}/model")
        files = sum(f.stat().st_size for f in Path(folder, "model").glob("*.safetensors"))
        print(f"{config.num_hidden_layers} layers, {files / 1e9:.2f} GB, tp {options.tp}")
        for way in WAYS:
            if options.without_tpplan and way.startswith("tpplan"):
                continue
            try:
                found = on_ranks(measured, options.tp, way, f"{folder}/model")
            except Exception as error:
                print(f"{way}: fails: {str(error).strip().splitlines()[-1][:160]}")
                continue
            figures[way] = {"files": files, **found}
            own = found["own"]
            line = f"{way}: a rank holds {own / 1e9:.2f} GB, {own / files:.0%} of the files; "
            line += f"at most {found['peak'] / own:.2f} of that in memory; {found['seconds']:.1f} s"
            if way == "tpplan":
                line += f"; {found['read'] / own:.3f} read of what it holds"
                line += f"; saved in {found['save']:.1f} s"
                spare = (found["peak"] - found["slice"]) / own
                missed |= found["read"] > BYTES * own or spare > MEMORY
            elif way == "tpplan, a new model":
                spare = (found["peak"] - found["tensor"]) / own
                line += f", {spare:.2f} beside its largest tensor"
                missed |= spare > MEMORY
            print(line)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(options.check and missed)


if __name__ == "__main__":
    raise SystemExit(main())
