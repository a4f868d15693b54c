"""What is planted in the place of what is there: each takes the one and returns the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from tpplan.comm import collectives, products
from tpplan.comm.placements import ranges_of
from tpplan.comm.randomness import Randomness

Made = Callable[[Any], Any]


def nothing(*result: Any) -> Made:
    """Does nothing, and returns what is given here."""
    return lambda real: lambda *args, **kwargs: result[0] if result else None


def unsummed(real: Any) -> Any:
    """A collective that sums, without the other ranks."""
    return lambda x, *rest, **options: x.clone()


def unsummed_where(word: str) -> Made:
    """An all-reduce that is left out where the reason it is reported under has a word."""

    def made(real: Any) -> Any:
        def reduce(x: Any, group: Any, site: Any, op: str = "sum") -> Any:
            return x.clone() if word in site.reason else real(x, group, site, op)

        return reduce

    return made


def of_first_rank(real: Any) -> Any:
    """A function of a whole tensor, a dimension and a group, for the first rank everywhere."""

    def first(x: Any, dim: int, where: Any) -> Any:
        if hasattr(where, "group"):
            return real(x, dim, replace(where, group=replace(where.group, rank=0)))
        return real(x, dim, replace(where, rank=0))

    return first


def deferred_dropped(real: Any) -> Any:
    """What was deferred is left out; small models defer as large ones do."""
    products.WORTH = 0
    return lambda self, grads: grads


def deferred_twice(real: Any) -> Any:
    products.WORTH = 0

    def settle(self: Any, grads: Any) -> Any:
        own = real(self, grads)
        return [
            g if g is None or g is before else g + g for g, before in zip(own, grads, strict=True)
        ]

    return settle


def deferred_late(real: Any) -> Any:
    """Of each parameter the one that was deferred in the pass before."""
    products.WORTH = 0
    kept: dict[int, Any] = {}

    def settle(self: Any, grads: Any) -> Any:
        own = list(real(self, grads))
        before = kept.get(id(self))
        kept[id(self)] = [None if g is None else g.clone() for g in own]
        return own if before is None else before

    return settle


def last_piece_dropped(real: Any) -> Any:
    """Sent, and its place filled with that of another."""
    return lambda rows, pieces: [*(found := real(rows, pieces))[:-1], found[0]]


def pieces_reversed(real: Any) -> Any:
    return lambda rows, pieces: real(rows, pieces)[::-1]


def ranks_reversed(real: Any) -> Any:
    return lambda *given: real(*given).flip(0)


def every_second_unsummed(real: Any) -> Any:
    """An all-reduce in place, of which every second one leaves what this rank has."""
    count = 0

    def start(x: Any, group: Any, site: Any) -> Any:
        nonlocal count
        count += 1
        own, handle = x.clone(), real(x, group, site)
        return handle if count % 2 else collectives.Handle(own, site)

    return start


def any_product(real: Any) -> Any:
    """Of another weight of the same shape."""

    def serves(self: Any, x: Any, weight: Any, *rest: Any) -> bool:
        return self.weight is not weight and self.weight.shape == weight.shape

    return serves


def rows_of_next(real: Any) -> Any:
    """What comes from the ranks, in the order of other ranks."""

    def exchanged(tensors: Any, sent: Any, received: Any, transition: Any) -> Any:
        parts = (t.split(received) for t in real(tensors, sent, received, transition))
        return tuple(torch.cat([*each[1:], each[0]]) for each in parts)

    return exchanged


def gradient_lost(number: int) -> Made:
    """Of one of the tensors that are exchanged together."""

    def made(real: Any) -> Any:
        def backward(ctx: Any, *grads: Any) -> Any:
            found = list(real(ctx, *grads))
            if len(grads) > 1:
                found[3 + number] = torch.zeros_like(found[3 + number])
            return tuple(found)

        return backward

    return made


def next_expert(real: Any) -> Any:
    def of(chosen: Any, own: Any, transition: Any) -> Any:
        routes = real(chosen, own, transition)
        return routes._replace(expert=(routes.expert + 1) % own[2])

    return of


def no_means(real: Any) -> Any:
    def localize(
        parameters: Any, summed: Any, group: Any, site: Any, *rest: Any, **how: Any
    ) -> Any:
        divided, means = rest
        return real(parameters, summed, group, site, divided, [1] * len(means), **how)

    return localize


def reduce_out(real: Any) -> Any:
    def forward(ctx: Any, x: Any, transition: Any, _: bool) -> Any:
        ctx.transition = transition
        return x.clone()

    return forward


def reduced_again(real: Any) -> Any:
    def backward(ctx: Any, grad: Any) -> Any:
        crossing = ctx.transition
        return collectives.all_reduce(grad, crossing.group, crossing.backward), None, None

    return backward


def chunks_swapped(real: Any) -> Any:
    return lambda x, dim, length, *rest: real(x, dim, length, *rest).roll(x.size(dim), dim)


def along_the_batch(real: Any) -> Any:
    def gather(x: Any, dim: int, length: int, group: Any, site: Any) -> Any:
        shape = list(x.shape)
        shape[dim] = length
        whole = real(x, 0, x.size(0) * group.size, group, site)
        right = whole.numel() == torch.Size(shape).numel()
        return whole.reshape(shape) if right else real(x, dim, length, group, site)

    return gather


def own_gradient(real: Any) -> Any:
    def backward(ctx: Any, grad: Any) -> Any:
        return collectives.local_slice(grad, ctx.dim, ctx.transition.group), None, None, None, None

    return backward


def other_rows(real: Any) -> Any:
    def scatter(x: Any, dim: int, group: Any, *rest: Any, **options: Any) -> Any:
        rows = collectives.chunk(x.size(dim), group.size)
        return real(x.roll(rows, dim), dim, group, *rest, **options)

    return scatter


def own_for_all(real: Any) -> Any:
    """A gather in which each rank takes its own part for everybody's."""
    return lambda x, dim, length, *rest: x.expand(length, *x.shape[1:])


def unsummed_rows(real: Any) -> Any:
    def scatter(
        x: Any, dim: int, group: Any, site: Any, bias: Any = None, dtype: Any = None
    ) -> Any:
        part = collectives.local_slice(x if dtype is None else x.to(dtype), dim, group)
        return part if bias is None else part + bias

    return scatter


def bias_of_each_rank(real: Any) -> Any:
    def scatter(
        x: Any, dim: int, group: Any, site: Any, bias: Any = None, dtype: Any = None
    ) -> Any:
        every = None if bias is None else bias * group.size
        return real(x, dim, group, site, every, dtype=dtype)

    return scatter


def rows_lost(real: Any) -> Any:
    def backward(ctx: Any, grad: Any) -> Any:
        shape = list(grad.shape)
        shape[ctx.dim] = grad.size(ctx.dim) * ctx.transition.group.size
        whole = grad.new_zeros(shape)
        at = grad.size(ctx.dim) * ctx.transition.group.rank
        whole.narrow(ctx.dim, at, grad.size(ctx.dim)).copy_(grad)
        return whole.narrow(ctx.dim, 0, ctx.length), None, None

    return backward


def times_ranks(real: Any) -> Any:
    def backward(ctx: Any, grad: Any) -> Any:
        first, *rest = real(ctx, grad)
        return first * ctx.transition.group.size, *rest

    return backward


def padding_kept(real: Any) -> Any:
    def gather(x: Any, dim: int, length: int, group: Any, site: Any) -> Any:
        return real(x, dim, x.size(dim) * group.size, group, site)

    return gather


def averaged(real: Any) -> Any:
    return lambda tensors, group, site: [t / group.size for t in real(tensors, group, site)]


def sums_swapped(real: Any) -> Any:
    def swapped(tensors: Sequence[Any], group: Any, site: Any) -> Any:
        found = real(tensors, group, site)
        alike: dict[Any, list[int]] = {}
        for i, t in enumerate(found):
            alike.setdefault(t.shape, []).append(i)
        order = {
            i: j for same in alike.values() for i, j in zip(same, same[1:] + same[:1], strict=True)
        }
        return [found[order[i]] for i in range(len(found))]

    return swapped


def shared_apart(real: Any) -> Any:
    def kept(grad: Any, total: Any, spec: Any, group: Any) -> Any:
        shared = ranges_of(spec) is not None
        return grad if shared else real(grad, total, spec, group)

    return kept


def copied(real: Any) -> Any:
    return lambda ctx, *args: tuple(t.clone() for t in real(ctx, *args))


def next_rank(real: Any) -> Any:
    return lambda self, whole, rank: real(self, whole, (rank + 1) % len(self.pieces))


def put_reversed(real: Any) -> Any:
    return lambda self, whole, local, rank: real(self, whole, local.flip(self.dim), rank)


def rank_modulo(real: Any) -> Any:
    def units(part: Any, index: int, ranks: int) -> Any:
        if part.units < ranks:
            return index % part.units, index % part.units + 1
        return real(part, index, ranks)

    return units


def own_largest(real: Any) -> Any:
    def reduce(x: Any, group: Any, site: Any, op: str = "sum") -> Any:
        return x.clone() if op == "max" else real(x, group, site, op)

    return reduce


def ignored_counted(real: Any) -> Any:
    def loss(
        rows: Any, target: Any, vocabulary: Any, weight: Any, ignored: int, how: str, *rest: Any
    ) -> Any:
        if how != "mean":
            return real(rows, target, vocabulary, weight, ignored, how, *rest)
        total = real(rows, target, vocabulary, weight, ignored, "sum", *rest)
        return total / target.numel()

    return loss


def kept_chunk(real: Any) -> Any:
    def chunk_of(x: Any) -> Any:
        kept = getattr(x, "_tpplan_chunk", None)
        return None if kept is None else kept[0]

    return chunk_of


def bias_before_sum(real: Any) -> Any:
    def reduced(module: Any, partial: Any, biases: Any, *_: Any) -> Any:
        return real(module, sum(biases, partial), ())

    return reduced


def one_forgotten(real: Any) -> Any:
    def forward(self: Any, input: Any) -> Any:
        out = real(self, input)
        parts = self._tpplan.stream.parts
        if parts is not None:
            parts.kept.pop(self._tpplan.plan.together, None)
        return out

    return forward


def unmasked(real: Any) -> Any:
    def look_up(ids: Any, weight: Any, first: int, *rest: Any) -> Any:
        return F.embedding((ids - first).clamp(0, weight.size(0) - 1), weight)

    return look_up


def first_heads(real: Any) -> Any:
    return lambda x, dim, heads, rank, size: real(x, dim, heads, 0, size)


def keys_for_values(real: Any) -> Any:
    def projected(self: Any, *given: Any) -> Any:
        q, k, v = real(self, *given)
        return q, v, k

    return projected


def none_summed(real: Any) -> Any:
    return lambda module, names, summed, *rest: real(module, names, [False] * len(summed), *rest)


def doubled_first(real: Any) -> Any:
    def twice(*args: Any, **kwargs: Any) -> Any:
        first, *rest = real(*args, **kwargs)
        return 2 * first, *rest

    return twice


def gate_and_up(real: Any) -> Any:
    return lambda dy, gate, up, kind, dgate, dup: real(dy, gate, up, kind, dup, dgate)


def own_gradient_of_copy(real: Any) -> Any:
    return lambda ctx, grad: (grad, None)


def rounded_down(real: Any) -> Any:
    return lambda length, size: max(1, length // size)


def unsummed_list(real: Any) -> Any:
    return lambda tensors, group, site: list(tensors)


def uncut(real: Any) -> Any:
    return lambda self, local, length, dim: local


def of_first_number(real: Any) -> Any:
    return lambda *numbers: real(numbers[0])


def own_masks(real: Any) -> Any:
    return Randomness.own


def no_fingerprint(real: Any) -> Any:
    return lambda t, group: torch.zeros((), dtype=torch.long)


def own_buffer(real: Any) -> Any:
    return lambda source, buffer, mesh: buffer.clone()


def one_more(real: Any) -> Any:
    return lambda rows, size: real(rows, size) + 1


def class_before(real: Any) -> Any:
    return lambda classes, first, *rest: real(classes, max(first - 1, 0), *rest)


def no_rest(real: Any) -> Any:
    return lambda grad, *rest: grad


def next_pack(real: Any) -> Any:
    return lambda *given: real(*given).roll(1, 0)
