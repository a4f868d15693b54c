"""How often ranks of torch alone die with several gathers of one gloo group in flight.

Each of the two threads of a group notes what it did last in one string, without a lock
(``ProcessGroupGloo::runLoop``). ``all_gather_into_tensor`` is ALLGATHER_COALESCED there, which is
too long to lie in the string itself: memory that was freed is written, or freed again, and malloc
aborts. With ``--in-order`` the group has one thread, as where tpplan starts the ranks. tpplan
computes nothing here.
"""

from __future__ import annotations

import argparse
import contextlib
import time

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException

from benchmarks.common import on_ranks
from tpplan.compat import gloo_in_order

AT_ONCE = 8
BETWEEN = 1000
"""Rounds of so many, between questions whether the time is up."""


def gathers(seconds: float, in_order: bool) -> int:
    """How many gathers of 128 bytes ended, on a group of all ranks."""
    with gloo_in_order() if in_order else contextlib.nullcontext():
        group = dist.new_group()
    part, done, start = torch.randn(4, 8), 0, time.monotonic()
    over = torch.zeros(())
    while not over:
        for _ in range(BETWEEN):
            op = torch.ops._c10d_functional.all_gather_into_tensor
            sent = [op(part, dist.get_world_size(), group.group_name) for _ in range(AT_ONCE)]
            for whole in sent:
                torch.ops._c10d_functional.wait_tensor(whole)
        done += BETWEEN * AT_ONCE
        over.fill_(time.monotonic() - start > seconds)
        dist.broadcast(over, 0)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="in processes of their own")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a round in which none dies")
    parser.add_argument("--in-order", action="store_true", help="one thread for each group")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, 2 ranks, {AT_ONCE} gathers in flight")
    for _ in range(options.rounds):
        start = time.monotonic()
        try:
            print(f"{on_ranks(gathers, 2, options.seconds, options.in_order)} gathers", flush=True)
        except ProcessExitedException as died:
            print(f"died after {time.monotonic() - start:.0f} s: {died}", flush=True)


if __name__ == "__main__":
    main()
