"""A training step and greedy decoding of one Llama, sharded by tpplan, transformers and torch.

Two gloo ranks of one thread each; all variants live in the same processes and take turns. Before
anything is timed, the loss and all gradients of each are compared with the unsharded model's.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.common import (
    TOLERANCE,
    finish,
    gradient_error,
    on_ranks,
    option_parser,
    parse,
    table,
)
from benchmarks.models import (
    CONFIG,
    VARIANTS,
    Source,
    Trainer,
    full_gradients,
    save_model,
    variants_of,
)

RANKS = 2
DECODERS = ("tpplan TP", "tpplan TP+SP", "transformers TP", "torch TP")


@dataclass(frozen=True)
class Setting:
    """What is compared, and how much of it."""

    variants: tuple[str, ...]
    batch: int
    length: int
    tokens: int
    rounds: int
    decoding_rounds: int


def compare(folder: Path, setting: Setting) -> dict[str, Any]:
    """On a real rank: the errors of each variant, then its seconds by round."""
    source = Source(folder, init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",)))
    trainers = {name: Trainer(VARIANTS[name](source)) for name in setting.variants}
    reference = Trainer(source.model())
    torch.manual_seed(1)
    tokens = torch.randint(0, CONFIG["vocab_size"], (setting.batch, setting.length))

    errors = agreement(trainers, reference, tokens)
    decoding, equal = decode(trainers, reference, tokens[:1, :16], setting)

    losses: dict[str, list[float]] = {name: [] for name in trainers}
    steps = in_turns(
        lambda name: losses[name].append(trainers[name].step(tokens)),
        list(trainers),
        setting.rounds,
    )
    expected = [reference.step(tokens) for _ in range(setting.rounds + 1)]
    for name, own in losses.items():
        errors[name]["trained"] = max(abs(a / b - 1) for a, b in zip(own, expected, strict=True))
    return {
        "errors": errors,
        "step_s": steps,
        "decoding_s": decoding,
        "tokens_equal": equal,
        "mixed": [name for name, trainer in trainers.items() if trainer.mixed],
    }


def agreement(
    trainers: Mapping[str, Trainer], reference: Trainer, tokens: torch.Tensor
) -> dict[str, dict[str, float]]:
    """How far the loss and the gradients of each variant are from the unsharded model's."""
    loss = reference.loss(tokens)
    loss.backward()
    expected = full_gradients(reference.model)
    errors = {}
    for name, trainer in trainers.items():
        own = trainer.loss(tokens)
        own.backward()
        errors[name] = {
            "loss": abs(own.item() - loss.item()) / loss.item(),
            "gradients": gradient_error(full_gradients(trainer.model), expected),
        }
    return errors


def decode(
    trainers: Mapping[str, Trainer], reference: Trainer, prompt: torch.Tensor, setting: Setting
) -> tuple[dict[str, list[float]], dict[str, bool]]:
    """Seconds to decode greedily, by round; whether the tokens are the unsharded model's."""
    models: dict[str, Any] = {n: trainers[n].model for n in DECODERS if n in trainers}
    answers: dict[str, torch.Tensor] = {}

    def generate(model: Any) -> torch.Tensor:
        answer: torch.Tensor = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=setting.tokens,
            max_new_tokens=setting.tokens,
            pad_token_id=0,
        )
        return answer

    times = in_turns(
        lambda name: answers.update({name: generate(models[name])}),
        list(models),
        setting.decoding_rounds,
    )
    expected = generate(reference.model)
    return times, {name: torch.equal(answer, expected) for name, answer in answers.items()}


def in_turns(work: Callable[[str], None], names: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of ``work`` by name and round, the slower rank's, after one round that warms up.

    Each round starts with another name, so that none always runs first.
    """
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()
            dist.barrier()
            start = time.perf_counter()
            work(name)
            spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            if turn:
                times[name].append(spent.item())
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each variant's rounds."""
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def fastest(times: Mapping[str, float], ours: bool) -> str | None:
    """The fastest of tpplan's variants, or of the peers; None where there is none."""
    names = [name for name in times if name.startswith("tpplan") == ours]
    return min(names, key=times.__getitem__, default=None)


def ratios(times: Mapping[str, float]) -> tuple[str, dict[str, float]]:
    """Each variant's time over that of tpplan's fastest, or of the fastest peer without it."""
    base = fastest(times, ours=True) or fastest(times, ours=False)
    assert base is not None
    return base, {name: seconds / times[base] for name, seconds in times.items()}


def print_step(result: Mapping[str, Any]) -> None:
    """The times of a step and the errors, one variant a row."""
    times = medians(result["step_s"])
    base, ratio = ratios(times)
    kinds = ("loss", "gradients", "trained")
    rows = [
        [name, f"{times[name] * 1e3:.1f}", f"{ratio[name]:.2f}"]
        + [f"{result['errors'][name][kind]:.1e}" for kind in kinds]
        for name in times
    ]
    heads = ["training step", "median ms", f"÷ {base}", *(f"error: {kind}" for kind in kinds)]
    print(table(heads, rows))
    if result["mixed"]:
        print(
            f"{', '.join(result['mixed'])}: parameters are plain tensors and DTensors, which one\n"
            "fused AdamW group and clip_grad_norm_ refuse to hold together: each kind has its own\n"
            "group, and the norms of the two are combined by hand."
        )


def print_decoding(result: Mapping[str, Any], tokens: int) -> None:
    """Tokens a second and whether they are the right ones, one variant a row."""
    times = medians(result["decoding_s"])
    base, ratio = ratios(times)
    rows = [
        [
            name,
            f"{tokens / seconds:.1f}",
            f"{ratio[name]:.2f}",
            "equal" if result["tokens_equal"][name] else "DIFFERENT",
        ]
        for name, seconds in times.items()
    ]
    print("\n" + table(["greedy decoding", "tokens/s", f"time ÷ {base}", "tokens"], rows))


def missed_bars(result: Mapping[str, Any]) -> list[str]:
    """What is wrong, and where a peer is faster than tpplan."""
    missed = [
        f"{name}: error of {kind} {error:.1e} > {TOLERANCE}"
        for name, errors in result["errors"].items()
        for kind, error in errors.items()
        if error > TOLERANCE and kind != "trained"
    ]
    missed += [f"{n}: other tokens" for n, equal in result["tokens_equal"].items() if not equal]
    for what in ("step", "decoding"):
        times = medians(result[f"{what}_s"])
        ours, peer = fastest(times, ours=True), fastest(times, ours=False)
        # one mode is chosen for a step, but both have to decode
        every = [n for n in times if n.startswith("tpplan")] if what == "decoding" else [ours]
        for name in every:
            if name and peer and times[name] > times[peer]:
                missed.append(f"{what}: {name} is {times[name] / times[peer]:.2f} x {peer}")
    return missed


def main() -> int:
    """Compare, measure, print; the exit status."""
    parser = option_parser(__doc__)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256, help="of the sequences trained on")
    parser.add_argument("--tokens", type=int, default=64, help="to decode")
    parser.add_argument("--rounds", type=int, default=15, help="training steps of each variant")
    parser.add_argument("--decoding-rounds", type=int, default=5)
    options = parse(parser)
    setting = Setting(
        tuple(variants_of(options.without_tpplan)),
        options.batch,
        options.length,
        options.tokens,
        options.rounds,
        options.decoding_rounds,
    )
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        result: dict[str, Any] = on_ranks(compare, RANKS, Path(folder), setting)
    print_step(result)
    print_decoding(result, options.tokens)
    return finish(options, result, missed_bars(result))


if __name__ == "__main__":
    sys.exit(main())
