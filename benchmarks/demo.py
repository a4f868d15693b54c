"""An unmodified Llama, sharded on two gloo ranks and proved against itself, TP and TP+SP.

Prints the collectives that were measured against those the dry run predicts, and the worst error
of the loss, the logits and every gradient against the unsharded model. Exits with 1 unless the
errors are at most 1e-5 (float32) and the counts are equal.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import tpplan
from benchmarks.common import LLAMA, TOLERANCE, gradient_error, on_ranks
from tpplan.simulate import Collective, Recorder

RANKS, BATCH, SEQUENCE = 2, 2, 128
MODES = {"TP": False, "TP+SP": True}
PHASES = ("forward", "backward", "gradient_sync", "optimizer")


def new_model() -> nn.Module:
    """A ``LlamaForCausalLM`` with random weights, as transformers builds it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**LLAMA)  # type: ignore[arg-type]
    return LlamaForCausalLM(config).train()  # type: ignore[no-any-return]


def batch() -> dict[str, Tensor]:
    """Token ids and their labels."""
    torch.manual_seed(1)
    ids = torch.randint(0, LLAMA["vocab_size"], (BATCH, SEQUENCE))
    return {"input_ids": ids, "labels": ids}


def measure(sequence_parallel: bool) -> dict[str, Any]:
    """On a rank: shard, take a training step, compare."""
    reference = new_model()
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    tpplan.parallelize(model, "llama.yaml", mesh, sequence_parallel=sequence_parallel)
    with Recorder() as recorder:
        out = model(**batch())
        with recorder.during("backward"):
            out.loss.backward()
    logits = out.logits.detach()
    if isinstance(logits, DTensor):  # in training the model's own loss leaves them sharded
        logits = logits.full_tensor()
    expected = reference(**batch())
    expected.loss.backward()
    errors = {
        "loss": gradient_error({"": out.loss.detach()}, {"": expected.loss.detach()}),
        "logits": gradient_error({"": logits}, {"": expected.logits.detach()}),
        "gradients": gradient_error(_gradients(model), _gradients(reference)),
    }
    # after the gradients are compared: clipping changes them
    with Recorder() as stepping, stepping.during("optimizer"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.AdamW(model.parameters()).step()
    sent = [*recorder.collectives, *stepping.collectives]
    return {"collectives": [_key(c) for c in sent if c.phase in PHASES], **errors}


def measure_all() -> dict[str, dict[str, Any]]:
    """On a rank: every mode in turn."""
    return {mode: measure(sequence_parallel) for mode, sequence_parallel in MODES.items()}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    whole = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grad = parameter.grad
        whole[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return whole


def _key(collective: Collective) -> tuple[str, str, str, int]:
    return collective.phase, collective.kind, collective.module, collective.bytes


def main() -> int:
    """Measure both modes, print, and say whether everything holds."""
    console = Console(width=100)
    failures = []
    results = on_ranks(measure_all, RANKS)
    for mode, sequence_parallel in MODES.items():
        predicted = tpplan.dry_run(
            new_model(), "llama.yaml", tp=RANKS, sequence_parallel=sequence_parallel, inputs=batch()
        )
        expected = [_key(c) for c in predicted.collectives]
        measured = results[mode]
        layers = LLAMA["num_hidden_layers"]
        console.print(f"LlamaForCausalLM, {layers} layers, {mode}, {RANKS} gloo ranks")
        table = Table("phase", "collective", "measured", "predicted", box=None)
        for phase, kind in sorted({k[:2] for k in [*expected, *measured["collectives"]]}):
            counts = [
                sum(k[:2] == (phase, kind) for k in keys)
                for keys in (measured["collectives"], expected)
            ]
            table.add_row(phase.replace("_", " "), kind.replace("_", "-"), *map(str, counts))
        console.print(table)
        errors = {name: measured[name] for name in ("loss", "logits", "gradients")}
        same = measured["collectives"] == expected
        console.print(
            f"module by module: {'equal' if same else 'DIFFERENT'}\nworst error against the "
            f"unsharded model: {', '.join(f'{n} {e:.1e}' for n, e in errors.items())}\n"
        )
        failures += [f"{mode}: {n} error {e:.1e}" for n, e in errors.items() if not e <= TOLERANCE]
        failures += [] if same else [f"{mode}: measured collectives differ from predicted ones"]
    for failure in failures:
        console.print(f"FAILED {failure}")
    if not failures:
        console.print(f"Holds: every error is at most {TOLERANCE}, every collective as predicted.")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
