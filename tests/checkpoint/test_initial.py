"""A new model's values, made one tensor at a time: those that it would have been built with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tpplan.checkpoint.initial import Initial
from tpplan.compat import is_fake


class Told(nn.Module):
    """Values from all that initializations do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        nn.init.orthogonal_(self.linear.weight)
        self.embedding = nn.Embedding(7, 6, padding_idx=2)
        self.tied = nn.Linear(6, 7, bias=False)
        self.tied.weight = self.embedding.weight
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(5, 5), std=0.1))
        self.steps = nn.Parameter(torch.exp(torch.rand(8) * 3.0).clamp(min=0.1))
        self.steps.data.copy_(self.steps + torch.log(-torch.expm1(-self.steps)))
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.turned.marked = "kept"  # type: ignore[attr-defined]
        with torch.no_grad():
            self.linear.bias[1:3] = torch.tensor([2.0, 3.0])
            self.linear.weight[:, ::2] *= 2
        self.frozen = nn.Parameter(torch.arange(4.0), requires_grad=False)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("table", torch.randperm(9), persistent=False)
        self.attribute = torch.linspace(0, 1, 5)


class ReadBefore(nn.Module):
    """A value of what is overwritten later, after it was read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(4))
        nn.init.normal_(self.first)
        doubled = self.first.data * 2
        nn.init.normal_(self.first)
        self.second = nn.Parameter(torch.zeros(4))
        self.second.data.copy_(doubled)
        self.second.data += self.first.data


class Seeded(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.a = nn.Parameter(torch.randn(5, generator=generator))
        self.b = nn.Parameter(torch.empty(5).uniform_(generator=generator) + torch.rand(5))


class Looking(nn.Module):
    """Its code hangs on its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        self.many = nn.Parameter(torch.rand(2 + bool((self.weight > 0.5).any())))
        self.weight.data /= self.weight.max().item()


def transformer() -> nn.Module:
    """Torch's own, which copies its layers."""
    return nn.Transformer(8, 2, 1, 1, 8, batch_first=True)


@pytest.mark.parametrize("kind", [Told, ReadBefore, Seeded, Looking, transformer])
def test_as_built(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    reference, after = kind(), torch.get_rng_state()
    torch.manual_seed(3)
    initial = Initial(kind)
    assert torch.equal(torch.get_rng_state(), after)
    assert all(p.is_meta for p in initial.model.parameters())
    initial.fill()
    assert torch.equal(torch.get_rng_state(), after)
    names = [name for name, _ in reference.named_parameters(remove_duplicate=False)]
    assert [n for n, _ in initial.model.named_parameters(remove_duplicate=False)] == names
    for find in (nn.Module.named_parameters, nn.Module.named_buffers):
        made = dict(find(initial.model))
        for name, tensor in find(reference):
            assert torch.equal(made[name], tensor), name
            assert made[name].requires_grad == tensor.requires_grad
            assert made[name].stride() == tensor.stride()


def test_what_was_put_on_them() -> None:
    initial = Initial(Told)
    model = initial.model
    assert isinstance(model, Told)
    assert model.turned.marked == "kept"  # type: ignore[attr-defined]
    assert model.tied.weight is model.embedding.weight
    initial.fill()
    assert model.tied.weight is model.embedding.weight
    assert torch.equal(model.attribute, torch.linspace(0, 1, 5)) and not is_fake(model.attribute)


class Counting(nn.Module):
    """A shape hangs on its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        self.positive = nn.Parameter(torch.nonzero(self.weight > 0.5).float())


class Listing(nn.Module):
    """Holds a tensor where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        self.kept = {"scales": [torch.ones(3)]}


class Sharing(nn.Module):
    """Two parameters on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.rand(6))
        self.part = nn.Parameter(self.both.data[:3])


class Elsewhere(nn.Module):
    """On another device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device="meta"))


REFUSED = {
    Counting: "nonzero",
    Listing: "a list",
    Sharing: "the same memory",
    Elsewhere: "on the CPU",
}


@pytest.mark.parametrize(("kind", "why"), REFUSED.items())
def test_refused(kind: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(Exception, match=why):
        Initial(kind)
