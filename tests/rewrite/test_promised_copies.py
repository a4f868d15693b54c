"""Float32 copies of 16-bit logits, which are made when they are read: as if made at once."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.compare import full
from tests.models import SHARDED_LOGITS, hf, sharded, token_ids
from tests.ranks import Ranks
from tests.rewrite import MODES
from tpplan.comm import promised
from tpplan.roles import logits as room

MADE = promised._Later.made
Case = Callable[[Any], Sequence[torch.Tensor]]


def changed_since(x: Any) -> Sequence[torch.Tensor]:
    later = x.float()
    x.mul_(2)
    return later, x.float()


def changed_by_a_view(x: Any) -> Sequence[torch.Tensor]:
    before = x[0]
    later, view = x.float(), x[1]
    before.mul_(2)
    view[1:].zero_()
    return later, x


def changed_in_a_class(x: Any) -> Sequence[torch.Tensor]:
    later = x.float()
    x[..., 5] = 1
    x[..., 3:7].mul_(3)
    return later, x


def changed_by_its_rows(x: Any) -> Sequence[torch.Tensor]:
    later = x.float()
    with torch.no_grad():
        (x.to_local() if isinstance(x, DTensor) else x).mul_(2)
    return (later,)


def changed_in_a_list(x: Any) -> Sequence[torch.Tensor]:
    later, other = x.float(), x * 1
    torch._foreach_mul_([other, x], 2)
    return later, other


def changed_itself(x: Any) -> Sequence[torch.Tensor]:
    later = x.float()
    view, apart = later[0], later.clone()
    later.mul_(2)
    return later, view, apart, x


def view_changed(x: Any) -> Sequence[torch.Tensor]:
    later = x.float()
    rows, apart = later.view(-1, x.size(-1)), later[1].contiguous()
    rows[3:].zero_()
    rows[..., 2] = 5
    return later, rows, apart, later[1]


def views_of_views(x: Any) -> Sequence[torch.Tensor]:
    later = x.float()
    shifted = later[..., :-1, :]
    apart = shifted.contiguous().view(-1, x.size(-1))
    turned = later.transpose(0, 1)
    shifted.zero_()
    return turned, later, apart, turned.unsqueeze(0).squeeze(0), shifted.reshape(-1, x.size(-1))


def copies_of_copies(x: Any) -> Sequence[torch.Tensor]:
    later = x.float()
    first, second = later.clone(), later[:, 1:].contiguous()
    third = first.clone()
    first.zero_()
    later.add_(1)
    return third, second, first, later


def dropped(x: Any) -> Sequence[torch.Tensor]:
    """What nobody has any more is not made, and keeps nothing."""
    gone = x.float()
    ref = weakref.ref(gone)
    del gone
    assert ref() is None
    x.mul_(2)
    return (x,)


def classes(x: Any) -> Sequence[torch.Tensor]:
    later = x.float()
    return later.argmax(-1), later.softmax(-1), later[..., 3], later.topk(3, -1).values


def of_several(x: Any) -> Sequence[torch.Tensor]:
    a, b = x.float(), (x * 2).float()
    return a + b, torch.cat([a, b]), torch.where(a > b, a, b), torch.stack([b[0], a[1]])


def like_it(x: Any) -> Sequence[torch.Tensor]:
    later = x.float()
    return torch.zeros_like(later), later.new_ones(2), torch.full_like(later, 3)


def copied_deeply(x: Any) -> Sequence[torch.Tensor]:
    with torch.no_grad():
        later = x.float()
        a = copy.deepcopy(later)
        b = copy.deepcopy(later)
        later.zero_()
    return a, b, later


def in_inference(x: Any) -> Sequence[torch.Tensor]:
    later = x.float()
    with torch.inference_mode():
        later.sum()
        other = x.float()
        view = other[0]
        other.mul_(2)
        found = other.clone(), view.clone()
    return later * 2, later.square(), *(t.clone() for t in found)


def without_gradients(x: Any) -> Sequence[torch.Tensor]:
    with torch.no_grad():
        later = x.float()
        view = later.view(-1, x.size(-1))
        view += 1
    return later, view, x.detach().float(), x.float().detach()


def in_float16(x: Any) -> Sequence[torch.Tensor]:
    return x.half().float(), x.half().float().half(), x.float().bfloat16()


def recomputed(x: Any) -> Sequence[torch.Tensor]:
    def losses(x: torch.Tensor) -> torch.Tensor:
        return x.float().logsumexp(-1)

    return (
        checkpoint(losses, x, use_reentrant=False),  # type: ignore[return-value]
        checkpoint(losses, x, use_reentrant=True),
    )


def of_gradients(x: Any) -> Sequence[torch.Tensor]:
    with torch.enable_grad():
        later = x.detach().requires_grad_().float()
        (grad,) = torch.autograd.grad(later.pow(3).sum(), later, create_graph=True)
        (again,) = torch.autograd.grad(grad.sum(), later)
    return grad.detach(), again


def by_threads(x: Any) -> Sequence[torch.Tensor]:
    later = x.float()
    views = [later[i : i + 1] for i in range(2)] * 4
    found = dict[int, torch.Tensor]()

    def read(i: int) -> None:
        found[i] = views[i] + 1

    threads = [threading.Thread(target=read, args=(i,)) for i in range(len(views))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[i] for i in range(len(views))]


def compiled(x: Any) -> Sequence[torch.Tensor]:
    return (torch.compile(lambda t: t * 2 + 1, backend="aot_eager")(x.float()),)


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        changed_since, changed_by_a_view, changed_in_a_class, changed_by_its_rows,
        changed_in_a_list, changed_itself, view_changed, views_of_views, copies_of_copies,
        dropped, classes, of_several, like_it, copied_deeply, in_inference,
        without_gradients, in_float16, recomputed, of_gradients, by_threads, compiled,
    )
}  # fmt: skip


def outcome(case: Case, logits: Any, trained: bool) -> list[torch.Tensor]:
    """What a case gives, and the gradient of ``logits``."""
    start = logits.detach().requires_grad_(trained)
    with torch.set_grad_enabled(trained):
        found = case(start * 1)
        whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in found]
        if not trained:
            return whole
        generator = torch.Generator().manual_seed(5)
        sums = [
            (t * torch.randn(t.shape, generator=generator)).sum() for t in whole if t.requires_grad
        ]
        if not sums:
            return whole
        torch.stack([s.float() for s in sums]).sum().backward()
    return [*(t.detach() for t in whole), full(start.grad)]


def cases_job(mesh: DeviceMesh, sp: bool) -> dict[str, str]:
    """What is not as of a whole tensor, or as of a copy made at once."""
    model = sharded(hf(use_cache=False).bfloat16(), mesh, sp, SHARDED_LOGITS)
    with torch.no_grad():
        logits = model.train()(input_ids=token_ids(2, 9, 1)).logits
    assert isinstance(logits, room.Logits)
    whole, wrong = logits.full_tensor(), dict[str, str]()
    for name, case in CASES.items():
        for trained in (True, False):
            with patch.object(promised._Later, "made", autospec=True, side_effect=MADE) as made:
                got = outcome(case, logits, trained)
            with patch.object(room, "promised", lambda *_: None):
                early = outcome(case, logits, trained)
            expected = outcome(case, whole, trained)
            if not len(got) == len(early) == len(expected):
                wrong[f"{name} {trained}"] = "another number of results"
            elif not all(map(torch.equal, got, early)):
                wrong[f"{name} {trained}"] = "not as of a copy made at once"
            for e, g in zip(expected, got, strict=True):
                if e.dtype != g.dtype or not torch.allclose(e, g, rtol=1e-5, atol=1e-6):
                    wrong[f"{name} {trained}"] = f"off by {(e - g).abs().max()}"
            if bool(made.mock_calls) is (name == "dropped"):
                wrong[f"{name} {trained}"] = f"made {len(made.mock_calls)} copies"
    return wrong


@MODES
@pytest.mark.parametrize("tp", [2, 4])
def test_copies(ranks: Ranks, tp: int, sp: bool) -> None:
    assert ranks.run(tp, cases_job, sp) == [{}] * tp


def guarded_job(mesh: DeviceMesh) -> list[str]:
    """What becomes of a copy whose numbers are gone, and of one that a CUDA graph is to hold."""
    model = sharded(hf(use_cache=False).bfloat16(), mesh, False, SHARDED_LOGITS)
    with torch.no_grad():
        logits = model(input_ids=token_ids(2, 9, 1)).logits
    later, found = logits.float(), list[str]()
    logits._local_tensor.mul_(2)
    try:
        later.sum()
    except RuntimeError as error:
        found.append(str(error))
    op, kwargs = torch.ops.aten._to_copy.default, {"dtype": torch.float32}
    for captured in (True, False):
        with (
            patch.object(room.Logits, "is_cuda", True),
            patch("torch.cuda.is_current_stream_capturing", lambda captured=captured: captured),
            patch("torch.cuda.current_stream", lambda _: None),
        ):
            made = promised.promised(op, (logits,), kwargs, room.PromisedLogits)
        found.append("at once" if made is None else "later")
    return found


def test_what_is_not_made_later(ranks: Ranks) -> None:
    for said, captured, not_captured in ranks.run(2, guarded_job):
        assert "past the tensor that holds them: read it earlier" in said
        assert (captured, not_captured) == ("at once", "later")


class Queue:
    """A CUDA stream, as far as copies know it."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def wait_stream(self, other: Queue) -> None:
        self.calls.append((self, other))

    def synchronize(self) -> None:
        self.calls.append(self)


def test_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reads a copy first waits for the one it was to be made on, and all for it."""
    calls = list[Any]()
    queues = first, second = Queue(calls), Queue(calls)
    x: Any = SimpleNamespace(is_cuda=True, device="cuda:0")
    monkeypatch.setattr(promised, "version_of", lambda x: 0)
    monkeypatch.setattr(promised, "computed", lambda *call: calls.append("made"))
    monkeypatch.setattr(promised, "local_of", lambda x: x)
    for now in queues:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: first)
        later = promised._Later(None, (x,), {})
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, now=now: now)
        later.made()
    assert calls == ["made", (second, first), "made", second]
