"""The times that decide the split are the worker's own, whatever else happens in a step."""

from __future__ import annotations

import pytest

from evenstride.testing import RankPool
from tests.multiproc.loops import gradients_at_commit, timed

HOWS = (
    "plain",
    "token weights",
    "a user's hook",
    "static_graph",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "micro-batches",
    "torch.compile",
    "evaluation and saving",
    "checkpointed first layer",
    "checkpointed last layer",
    "checkpointed both layers",
    "checkpointed both layers, static_graph",
)


@pytest.mark.alone
@pytest.mark.parametrize("how", HOWS)
def test_injected_work_is_read_back_on_every_rank(ranks: RankPool, how: str) -> None:
    measured = ranks.run(timed, 2, how, [20.0, 60.0])

    for _, part_read in measured:
        # A wait that counts as work makes this 1.7 or more on the rank with less work; work that
        # does not count makes it 0. `benchmarks/gpu.py --parts waits` measures exactness.
        assert part_read == pytest.approx(1.0, abs=0.4)
    assert measured[1][0] > measured[0][0], "the ranks' work is one to three"


@pytest.mark.parametrize("static_graph", [False, True])
def test_a_step_commits_when_its_gradient_is_averaged(ranks: RankPool, static_graph: bool) -> None:
    one, other = ranks.run(gradients_at_commit, 2, static_graph)

    assert len(one) == 3
    assert one == other, "all ranks have the same gradient then, also in the first step"
