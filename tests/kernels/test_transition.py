"""Layouts around sequence-parallel collectives: values, views, padding and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels import DEVICE, DTYPES, TOLERANCES, beyond, error, errors, random
from tpplan.kernels.transition import pack, unpack

# ranks, batch, length, width: even, the last chunk short, ranks with nothing, one of everything
SIZES = pytest.mark.parametrize(
    ("ranks", "batch", "length", "width"),
    [(4, 3, 32, 64), (4, 3, 29, 7), (8, 2, 9, 5), (2, 5, 7, 4100), (3, 2, 1, 1), (1, 2, 6, 8)],
)


def packed(whole: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """The formula of ``pack``: each rank's padded chunk."""
    chunk = -(-whole.size(dim) // ranks)
    missing = ranks * chunk - whole.size(dim)
    padded = F.pad(whole, [0, 0] * (whole.dim() - 1 - dim) + [0, missing])
    return torch.stack(padded.split(chunk, dim))


def unpacked(gathered: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """The formula of ``unpack``: the chunks one behind the other, cut."""
    return torch.cat(gathered.unbind(0), dim).narrow(dim, 0, length)


@SIZES
@DTYPES
def test_values_and_gradients(
    ranks: int, batch: int, length: int, width: int, dtype: torch.dtype
) -> None:
    whole = random(batch, length, width, dtype=dtype, seed=1)
    found = errors(lambda x: pack(x, 1, ranks), lambda x: packed(x, 1, ranks), [whole])
    assert not beyond(found, 0)
    gathered = random(ranks, batch, -(-length // ranks), width, dtype=dtype, seed=2)
    found = errors(lambda x: unpack(x, 1, length), lambda x: unpacked(x, 1, length), [gathered])
    assert not beyond(found, 0)
    assert torch.equal(unpack(pack(whole, 1, ranks), 1, length), whole)


@SIZES
@DTYPES
def test_with_a_bias(ranks: int, batch: int, length: int, width: int, dtype: torch.dtype) -> None:
    """All ranks' shares make one bias, whatever the dtypes are."""
    inputs = [random(batch, length, width, dtype=dtype, seed=1, mean=3.0)]
    inputs.append(random(width, dtype=torch.float32, seed=2))

    def expected(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        missing = -length % ranks
        return packed(F.pad(x, (0, 0, 0, missing)) + b / ranks, 1, ranks)

    found = errors(lambda x, b: pack(x, 1, ranks, bias=b), expected, inputs)
    assert not beyond(found, TOLERANCES[dtype])
    alone = pack(inputs[0], 1, 1, bias=inputs[1])[0]
    assert error(alone, inputs[0].double() + inputs[1].double()) <= TOLERANCES[dtype]


@DTYPES
def test_with_a_cast(dtype: torch.dtype) -> None:
    for batch, length in ((1, 8), (3, 7)):
        whole = random(batch, length, 5, dtype=dtype, seed=1)
        chunks = pack(whole, 1, 2, dtype=torch.float32)
        assert chunks.dtype == torch.float32
        assert torch.equal(chunks, packed(whole.float(), 1, 2))
        (grad,) = torch.autograd.grad(chunks.sum(), whole)
        assert grad.dtype == dtype


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_dimension(dim: int) -> None:
    whole = random(2, 5, 7, 3, dtype=torch.float32, seed=1)
    found = errors(lambda x: pack(x, dim, 3), lambda x: packed(x, dim, 3), [whole])
    assert not beyond(found, 0)
    assert torch.equal(unpack(pack(whole, dim, 3), dim, whole.size(dim)), whole)


def test_a_bias_is_of_the_last_dimension() -> None:
    whole, bias = torch.randn(5, 2, 4, device=DEVICE), torch.randn(4, device=DEVICE)
    with pytest.raises(ValueError, match=r"a bias of \(4,\)"):
        pack(whole, 0, 2, bias=bias)


def test_no_copy_where_none_is_needed() -> None:
    for shape, dim in (((8, 4), 0), ((1, 8, 4), 1)):
        whole = torch.randn(*shape, device=DEVICE)
        chunks = pack(whole, dim, 4)
        assert torch.equal(chunks, packed(whole, dim, 4))
        assert chunks.data_ptr() == whole.data_ptr()
        for length in (8, 6):
            back = unpack(chunks, dim, length)
            assert torch.equal(back, unpacked(chunks, dim, length))
            assert back.data_ptr() == whole.data_ptr()
            assert back.is_contiguous()
    short = random(1, 7, 4, dtype=torch.float32, seed=1)
    found = errors(lambda x: pack(x, 1, 4), lambda x: packed(x, 1, 4), [short])
    assert not beyond(found, 0)


def test_any_layout() -> None:
    whole = random(5, 3, 4, dtype=torch.float32, seed=1).transpose(0, 1)
    assert torch.equal(pack(whole, 1, 2), packed(whole, 1, 2))
    gathered = random(3, 2, 4, 5, dtype=torch.float32, seed=1).transpose(0, 1)[..., ::2]
    assert torch.equal(unpack(gathered, 1, 7), unpacked(gathered, 1, 7))


def test_nothing_in_it() -> None:
    for shape in ((0, 5, 4), (2, 0, 4), (2, 5, 0)):
        whole = torch.empty(*shape, device=DEVICE, requires_grad=True)
        chunks = pack(whole, 1, 2)
        assert chunks.shape == (2, shape[0], -(-shape[1] // 2), shape[2])
        back = unpack(chunks, 1, shape[1])
        assert back.shape == shape
        back.sum().backward()


def test_gradients_of_gradients() -> None:
    whole = random(2, 5, 3, dtype=torch.float64, seed=1)
    gathered = random(3, 2, 2, 3, dtype=torch.float64, seed=1)
    assert torch.autograd.gradgradcheck(lambda x: pack(x.square(), 1, 3), whole)
    assert torch.autograd.gradgradcheck(lambda x: unpack(x.square(), 1, 5), gathered)


def test_pytorch_knows_the_ops() -> None:
    whole = random(2, 5, 4, dtype=torch.float32, seed=1)
    gathered = random(3, 2, 2, 4, dtype=torch.float32, seed=1)
    bias = random(4, dtype=torch.float32, seed=2)
    for shift, dtype in ((None, torch.float32), (bias, torch.float32), (bias, torch.bfloat16)):
        torch.library.opcheck(torch.ops.tpplan.pack.default, (whole, shift, 3, 2, dtype))
    torch.library.opcheck(torch.ops.tpplan.unpack.default, (gathered, 5))


def test_one_graph() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return unpack(2 * pack(2 * x, 1, 3), 1, 5).square().sum()

    x = random(2, 5, 4, dtype=torch.float32, seed=1)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    mine, theirs = (torch.autograd.grad(f(x), x)[0] for f in (compiled, run))
    assert torch.equal(mine, theirs)
