"""Losses of float32 copies of bfloat16 logits: what is kept of them, and what is not."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh

from tests.compare import full
from tests.models import SHARDED_LOGITS, VOCAB, hf, sharded, token_ids
from tests.ranks import Ranks
from tests.rewrite import MODES
from tpplan.comm import promised
from tpplan.comm.collectives import chunk
from tpplan.roles import logits as room

MADE = promised._Later.made
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def flat(x: torch.Tensor, t: torch.Tensor, **how: Any) -> torch.Tensor:
    return F.cross_entropy(x.reshape(-1, x.size(-1)), t.reshape(-1), **how)


def weighed(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.5, 2, x.size(-1))
    return flat(x.float(), t, weight=weight, label_smoothing=0.1)


def written(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    copy = x.float()
    copy[..., 1] = -2.0
    return flat(copy, t)


def view_written(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    copy = x.float()
    copy.view(-1, copy.size(-1)).mul_(2.0)
    return flat(copy, t)


def written_before_its_view(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    copy = x.float()
    view = copy.view(-1, copy.size(-1))
    copy.mul_(2.0)
    return F.cross_entropy(view, t.reshape(-1))


def freed(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    copy = x.float()
    same = copy.contiguous()
    loss, dead = flat(same, t), weakref.ref(copy)
    del copy, same
    assert dead() is None  # without the garbage collector
    return loss


def selected(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(t, dtype=torch.bool)
    mask[0, :3] = False
    return F.cross_entropy(x.float()[mask], t[mask])


def original_written(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    original = x * 1
    copy = original.float()
    original.mul_(2.0)
    return flat(copy, t) + original.sum().float() * 1e-3


def retained(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    copy = x.float()
    copy.retain_grad()
    flat(copy, t).backward(retain_graph=True)
    assert copy.grad is not None
    return flat(copy, t)


def hooked(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    view = x.float().view(-1, x.size(-1))
    view.register_hook(lambda grad: 2 * grad)
    return F.cross_entropy(view[:5], t.reshape(-1)[:5])


def without_gradients(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        copy = x.float()
    return flat(copy, t) + x.float().sum() * 1e-3


# whether the copy is left out, and the loss of logits (batch, length, classes)
LOSSES: dict[str, tuple[bool, Loss]] = {
    "float": (True, lambda x, t: flat(x.float(), t)),
    "to": (True, lambda x, t: F.cross_entropy(x.to(torch.float32).flatten(0, 1), t.flatten())),
    "named": (True, lambda x, t: flat(x.to(dtype=torch.float32), t, reduction="sum")),
    "shifted": (True, lambda x, t: flat(x.float()[..., :-1, :].contiguous(), t[:, 1:])),
    "classes second": (True, lambda x, t: F.cross_entropy(x.float().transpose(1, 2), t)),
    "each": (True, lambda x, t: flat(x.float(), t, reduction="none").square().mean()),
    "weighed": (True, weighed),
    "selected": (True, selected),
    "freed": (True, freed),
    "narrow": (True, flat),
    "scaled": (False, lambda x, t: flat(x.float() / 2, t)),
    "double": (False, lambda x, t: flat(x.float().double(), t)),
    "written": (False, written),
    "view written": (False, view_written),
    "written before its view": (False, written_before_its_view),
    "original written": (False, original_written),
    "retained": (False, retained),
    "hooked": (False, hooked),
    "without gradients": (False, without_gradients),
}


def losses_job(mesh: DeviceMesh, sp: bool) -> dict[str, list[str]]:
    """Of each loss, what is wrong."""
    reference = hf(use_cache=False).bfloat16()
    model = sharded(hf(use_cache=False).bfloat16(), mesh, sp, SHARDED_LOGITS)
    found = dict[str, list[str]]()
    for seed, (name, (left_out, loss)) in enumerate(LOSSES.items()):
        ids, target = token_ids(2, 9, seed), token_ids(2, 9, 100 + seed)
        kept = set[tuple[torch.dtype, int]]()

        def keep(t: torch.Tensor, kept: Any = kept) -> torch.Tensor:
            kept.add((t.dtype, t.numel()))
            return t

        def run(m: Any, ids: Any = ids, target: Any = target, loss: Loss = loss) -> list[Any]:
            m.zero_grad()
            logits = m(input_ids=ids).logits
            with saved_tensors_hooks(keep, lambda t: t):
                value = loss(logits, target)
            value.backward()
            return [value.detach(), *(full(p.grad) for p in m.parameters())]

        expected = run(reference)
        with patch.object(room, "_narrow", lambda x: x):
            wide = run(model)
        with patch.object(room, "promised", lambda *_: None):
            early = run(model)
        kept.clear()
        with patch.object(promised._Later, "made", autospec=True, side_effect=MADE) as made:
            got = run(model)
        wrong = found[name] = list[str]()
        if not all(map(torch.equal, early, got)):
            wrong.append("other numbers than of a copy made at once")
        read = name == "selected" or not left_out  # what is picked by a mask is no view
        if read is not bool(made.mock_calls):
            wrong.append(f"made {len(made.mock_calls)} copies")
        if not all(map(torch.equal, wide, got)) or wide[0].dtype != got[0].dtype:
            wrong.append("other numbers than of the copy")
        if got[0].dtype != expected[0].dtype:
            wrong.append(f"{got[0].dtype}")
        for e, g in zip(expected, got, strict=True):
            if (e - g).abs().max() > 2**-4 * e.abs().max():
                wrong.append(f"off by {(e - g).abs().max() / e.abs().max()}")
        # five tokens at least
        least = 5 * (VOCAB - chunk(VOCAB, mesh.size()) * (mesh.size() - 1))
        copied = any(n >= least and dtype.itemsize > 2 for dtype, n in kept)
        if left_out is copied and name != "without gradients":  # for which nothing is kept
            wrong.append(f"kept {kept}")
    return {name: wrong for name, wrong in found.items() if wrong}


@MODES
def test_what_is_kept(ranks: Ranks, sp: bool) -> None:
    assert ranks.run(2, losses_job, sp) == [{}, {}]
