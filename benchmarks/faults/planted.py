"""The faults: each puts something else in the place of one thing of tpplan's."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from benchmarks.faults import changes as to
from benchmarks.faults.changes import Made


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: what is wrong with it; where: a module of tpplan, and the path of a name in it.
        made: what is planted, of what is there.
        trial: the fixed model that shows it best, tried first.
    """

    name: str
    where: str
    made: Made
    trial: str = ""

    @property
    def room(self) -> str:
        """The part of tpplan it is in."""
        return self.where.partition(":")[0].partition(".")[0]

    def place(self) -> tuple[Any, str, Any]:
        """The object that has it, the name it has there, and what is there.

        Raises:
            AttributeError, ImportError: tpplan has no such thing any more; the fault needs another
                place.
        """
        module, _, path = self.where.partition(":")
        *outer, name = path.split(".")
        owner: Any = importlib.import_module(f"tpplan.{module}")
        for part in outer:
            owner = getattr(owner, part)
        return owner, name, vars(owner)[name] if name in vars(owner) else getattr(owner, name)

    def plant(self) -> None:
        """Put it there, for as long as this process lives."""
        owner, name, there = self.place()
        if isinstance(there, staticmethod):
            setattr(owner, name, staticmethod(self.made(there.__func__)))
        else:
            setattr(owner, name, self.made(there))


FAULTS = (
    # comm: the conjugate operators
    Fault(
        "f: the gradient is not summed", "comm.conjugates:_CopyIn.backward", to.own_gradient_of_copy
    ),
    Fault("f*: partial sums are not summed", "comm.conjugates:_ReduceOut.forward", to.reduce_out),
    Fault(
        "f*: the gradient is summed again", "comm.conjugates:_ReduceOut.backward", to.reduced_again
    ),
    Fault(
        "g: the ranks' chunks change places",
        "comm.conjugates:all_gather",
        to.chunks_swapped,
        "gpt sp",
    ),
    Fault(
        "g: gathers along another dimension",
        "comm.conjugates:all_gather",
        to.along_the_batch,
        "gpt sp",
    ),
    Fault(
        "g: the gradient of this rank alone",
        "comm.conjugates:_GatherIn.backward",
        to.own_gradient,
        "gpt sp",
    ),
    Fault("g: padding rows are kept", "comm.conjugates:all_gather", to.padding_kept, "gpt sp"),
    Fault("g*: another rank's rows", "comm.conjugates:reduce_scatter", to.other_rows, "gpt sp"),
    Fault("g*: rows are not summed", "comm.conjugates:reduce_scatter", to.unsummed_rows, "gpt sp"),
    Fault(
        "g*: the bias once for each rank",
        "comm.conjugates:reduce_scatter",
        to.bias_of_each_rank,
        "gpt sp",
    ),
    Fault(
        "split: the gradients of other rows are lost",
        "comm.conjugates:_Split.backward",
        to.rows_lost,
        "bare sp",
    ),
    Fault(
        "split: every rank takes the first one's rows",
        "comm.conjugates:local_slice",
        to.of_first_rank,
        "bare sp",
    ),
    Fault(
        "join: gradients times the ranks, no 1/N",
        "comm.conjugates:_Join.backward",
        to.times_ranks,
        "bare sp",
    ),
    Fault("rows of a rank are rounded down", "comm.collectives:chunk", to.rounded_down, "gpt sp"),
    # comm: gradients of parameters
    Fault(
        "gradients of whole parameters are not summed",
        "comm.gradients:coalesced_sum",
        to.unsummed_list,
        "gpt sp",
    ),
    Fault("they are averaged, not summed", "comm.gradients:coalesced_sum", to.averaged, "gpt sp"),
    Fault(
        "the sums of two parameters change places",
        "comm.gradients:coalesced_sum",
        to.sums_swapped,
        "gpt sp",
    ),
    Fault(
        "those of shared heads are not summed",
        "comm.gradients:_with_sum",
        to.shared_apart,
        "shared heads",
    ),
    Fault("local weights are stale after a step", "comm.gradients:_Localize.forward", to.copied),
    Fault("deferred gradients are dropped", "comm.deferred:Account.settle", to.deferred_dropped),
    Fault("deferred gradients count twice", "comm.deferred:Account.settle", to.deferred_twice),
    Fault(
        "deferred of one pass, given to the next", "comm.deferred:Account.settle", to.deferred_late
    ),
    # comm: products in pieces
    Fault("the last piece is dropped", "comm.pieces:spans", to.last_piece_dropped, "pieces sp"),
    Fault("pieces are put together reversed", "comm.pieces:spans", to.pieces_reversed, "pieces sp"),
    Fault(
        "rows of a piece are other ranks'",
        "comm.pieces:_Cut.apart",
        to.ranks_reversed,
        "pieces sp",
    ),
    Fault(
        "every second piece is not summed",
        "comm.pieces:start_all_reduce_",
        to.every_second_unsummed,
        "pieces",
    ),
    Fault(
        "a product that was made for another is taken",
        "comm.products:Ready.serves",
        to.any_product,
        "pieces sp",
    ),
    # comm: tokens, sent to their experts
    Fault("tokens come in others' places", "comm.exchange:_exchanged", to.rows_of_next, "ep"),
    Fault(
        "the factors' gradient is lost",
        "comm.exchange:_Exchange.backward",
        to.gradient_lost(1),
        "ep",
    ),
    Fault(
        "the sent tokens' gradient is lost",
        "comm.exchange:_Exchange.backward",
        to.gradient_lost(0),
        "ep",
    ),
    Fault("tokens go to the next expert", "roles.dispatch:Routes.of", to.next_expert, "ep"),
    Fault("gradients of experts are sums", "roles.parameters:localize", to.no_means, "ep"),
    Fault(
        "the router's gradient is of this rank's experts",
        "comm.gradients:coalesced_sum",
        to.unsummed_list,
        "experts",
    ),
    # comm: layouts, loss, stream, randomness
    Fault("rows of another rank are cut out", "layout:Rows.take", to.next_rank, "packed"),
    Fault("rows are put together in another order", "layout:Rows.put", to.put_reversed, "packed"),
    Fault("KV head by rank modulo heads", "layout:_units", to.rank_modulo, "two heads shared"),
    Fault(
        "the largest logit of each rank alone",
        "comm.cross_entropy:all_reduce",
        to.own_largest,
        "loss",
    ),
    Fault(
        "the sum of exponentials of each rank alone",
        "comm.cross_entropy:all_reduce",
        to.unsummed_where("exponentials"),
        "loss",
    ),
    Fault(
        "the target's logit of its rank alone",
        "comm.cross_entropy:all_reduce",
        to.unsummed_where("target"),
        "loss",
    ),
    Fault(
        "logits changed in place are taken as before",
        "roles.logits:chunk_of",
        to.kept_chunk,
        "in place sp",
    ),
    Fault("padding goes out with the last rows", "comm.source:Source.unpadded", to.uncut, "gpt sp"),
    Fault(
        "the same dropout masks on all ranks", "comm.randomness:mixed", to.of_first_number, "masks"
    ),
    Fault(
        "other masks for what is whole", "comm.randomness:Randomness.shared", to.own_masks, "masks"
    ),
    Fault("other batches are not noticed", "comm.agreement:fingerprint", to.no_fingerprint, "told"),
    Fault("what enters regions is not compared", "comm.alike:Alike._note", to.nothing(), "told"),
    Fault(
        "replicas that drift are not noticed",
        "comm.alike:Alike.note_replicas",
        to.nothing(),
        "told",
    ),
    Fault("another loss is not noticed", "roles.comparing:watch_loss", to.nothing(), "told"),
    Fault(
        "each rank's own model is not compared", "proof.prove:require_alike", to.nothing(), "told"
    ),
    Fault("each rank's own buffers", "rewrite.buffers:_from", to.own_buffer, "told"),
    Fault("what was changed later is not looked at", "roles.members:look", to.nothing(), "told"),
    # rewrite
    Fault("a row-parallel bias on every rank", "roles.linear:reduced", to.bias_before_sum),
    Fault(
        "one of the outputs reduced together is lost",
        "roles.linear:RowwiseTogether.forward",
        to.one_forgotten,
        "together",
    ),
    Fault("the vocabulary is off by one", "roles.vocab:chunk", to.one_more),
    Fault("ids of other ranks are not masked", "roles.vocab:reference", to.unmasked),
    Fault("ranks' logits change places", "roles.logits:join", to.chunks_swapped),
    Fault("classes are off by one", "roles.logits:Vocabulary", to.class_before, "loss"),
    Fault(
        "a mean over ignored tokens too", "roles.logits:cross_entropy", to.ignored_counted, "loss"
    ),
    Fault("squares of each rank's width alone", "roles.norm:reduce_out", to.unsummed, "together"),
    Fault("means of each rank's width alone", "roles.norm:gather_in", to.own_for_all, "together"),
    Fault("gradient of the squares is not summed", "roles.norm:copy_in", to.unsummed, "together"),
    Fault("biases of the first rank's heads", "roles.heads:heads_of", to.first_heads, "packed"),
    Fault("sizes in the code are left whole", "rewrite.planned:assign", to.nothing(), "packed"),
    Fault("positions of the first rank's rows", "roles.sequence:split", to.of_first_rank, "gpt sp"),
    Fault(
        "keys for values",
        "roles.attention:MultiheadAttention._projected",
        to.keys_for_values,
        "torch's attention",
    ),
    Fault("what enters a region has no gradient sum", "comm.products:copy_in", to.unsummed),
    Fault("no parameter is known to be summed", "rewrite.planned:Own", to.none_summed, "gpt sp"),
    # planner
    Fault("packed layers are cut as one", "planner.geometry:Geometry.rows", to.nothing(), "packed"),
    Fault("the rewritten model is not proved", "proof:prove", to.nothing(), "mixed columns"),
    Fault(
        "no second step in training is proved",
        "proof.scenes:Played.may_play_loud",
        to.nothing(),
        "second step",
    ),
    Fault(
        "positions may mix", "planner.notes:Notes.note_positions", to.nothing(), "mixed positions"
    ),
    Fault(
        "what no rule mentions passes",
        "planner.checks:check_unmentioned",
        to.nothing(),
        "unmentioned",
    ),
    Fault(
        "ties are not looked at", "planner.placing:Placing.check_ties", to.nothing(), "tied apart"
    ),
    Fault(
        "all outputs are reduced together", "planner.together:_only_added", to.nothing(True), "gpt"
    ),
    # kernels, by what they do without a GPU
    Fault(
        "a norm's gradient is doubled",
        "kernels.norm:_reference_backward",
        to.doubled_first,
        "kernels",
    ),
    Fault(
        "the gradients of gate and up change places",
        "kernels.gated:_gradients",
        to.gate_and_up,
        "kernels",
    ),
    Fault(
        "the target is left out of the gradient",
        "kernels.cross_entropy:add_rest",
        to.no_rest,
        "loss",
    ),
    Fault(
        "rows are packed for the next rank",
        "kernels.transition:reference_pack",
        to.next_pack,
        "kernels sp",
    ),
)
"""All faults."""
