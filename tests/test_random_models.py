"""Random models with a right plan are right, edited ones right or refused with a position.

A few dozen here; ``python -m benchmarks.random_models`` runs thousands.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from benchmarks.random_models import edits, recipe
from benchmarks.random_models.edits import Edit
from benchmarks.random_models.judge import REFUSED, RIGHT, Verdict, judge, simulated, worst
from benchmarks.random_models.run import Job, told
from tests.ranks import Ranks
from tests.thorough import THOROUGH

RANDOM = st.randoms(use_true_random=False)
# the same examples in every run
SETTINGS = settings(
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
)
REFUSED_AT_MOST = 0.1  # of so few; 0.02 of thousands
SHARE = 0.25  # judged on processes too


def verdict(ranks: Ranks, job: Job) -> Verdict:
    """What becomes of a job, which must be right or refused with a position."""
    case = job.edit.of(job.recipe)
    found = simulated(None, case, job.tp, job.sequence_parallel)
    if found.kind == RIGHT and job.apart(SHARE):
        found = worst(ranks.run(job.tp, judge, case, job.sequence_parallel))
    note(told(job, found))
    assert found.kind in (RIGHT, REFUSED)
    assert found.positioned
    return found


@pytest.mark.turns(48)
def test_right_plans(ranks: Ranks) -> None:
    kinds: Counter[str] = Counter()

    @settings(SETTINGS, max_examples=200 if THOROUGH else 16)
    @given(random=RANDOM, tp=st.sampled_from((2, 4)), sequence_parallel=st.booleans())
    def judged(random: Random, tp: int, sequence_parallel: bool) -> None:
        job = Job("model", recipe.drawn(random), Edit(), tp, sequence_parallel)
        kinds[verdict(ranks, job).kind] += 1

    judged()
    assert kinds[REFUSED] <= REFUSED_AT_MOST * kinds.total()


@pytest.mark.turns(24)
def test_edited_plans_and_models(ranks: Ranks) -> None:
    @settings(SETTINGS, max_examples=400 if THOROUGH else 32)
    @given(random=RANDOM, sequence_parallel=st.booleans())
    def judged(random: Random, sequence_parallel: bool) -> None:
        made, edit = edits.drawn(random, recipe.drawn(random))
        verdict(ranks, Job("edit", made, edit, 2, sequence_parallel))

    judged()


def test_a_wrong_result_is_seen(ranks: Ranks) -> None:
    """The harness itself: a model that answers otherwise once it is sharded."""
    plain = Edit().of(recipe.Recipe())
    source = plain.source.replace(
        "logits = self.lm_head(x)",
        "logits = self.lm_head(x) * (2 if hasattr(self.lm_head.weight, 'placements') else 1)",
    )
    assert source != plain.source
    for kind, text in (("right", plain.source), ("wrong", source)):
        case = type(plain)(text, plain.plan)
        assert {v.kind for v in ranks.run(2, judge, case, False)} == {kind}
