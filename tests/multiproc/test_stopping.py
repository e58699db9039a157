"""A checkpoint between two steps is of one model, and what goes on from it is what was saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstride.testing import RankPool
from tests.multiproc.stopping import left, stopped


@pytest.mark.parametrize(
    "sync", ["local-sgd(every=4,outer_rate=0.7,outer_momentum=0.9)", "delayed", "bsp-ps(servers=2)"]
)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    ranks: RankPool, tmp_path: Path, sync: str
) -> None:
    whole = ranks.run(stopped, 2, sync, str(tmp_path / "whole"), None)
    first = ranks.run(stopped, 2, sync, str(tmp_path / "parts"), 12)
    second = ranks.run(stopped, 2, sync, str(tmp_path / "parts"), None)

    assert [one[:2] for one in first] == [(None, 12)] * 2
    assert [one[:2] for one in second] == [(10, whole[0][1])] * 2
    assert second[0][2] == second[1][2] == whole[0][2] == whole[1][2]


@pytest.mark.parametrize(("stop", "whole"), [(4, True), (5, False), (7, True), (13, False)])
def test_a_run_that_ends_with_as_many_models_as_ranks_says_so(
    ranks: RankPool, stop: int, whole: bool
) -> None:
    for reported in ranks.run(left, 2, "local-sgd(every=4)", stop):
        assert any("the models of the ranks differ" in text for text in reported) != whole
