"""Training over parameter servers, on real processes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from evenstride.testing import RankPool
from tests.messages import check_message
from tests.multiproc.serving import Run, train
from tests.multiproc.serving_refusals import broken, loop, smaller, two
from tests.multiproc.training import relative_error

CASES = {
    "one server": (2, Run("bsp-ps")),
    "three servers, three workers": (3, Run("bsp-ps(servers=3)", "static:3,0,27")),
    "a bare module": (2, Run("bsp-ps(servers=2)", wrapped=False)),
    "Adam": (2, Run("bsp-ps(servers=2)", optimizer="Adam")),
    "micro-batches": (2, Run("bsp-ps", micro=4)),
    "shares that move": (2, Run("bsp-ps", "adaptive")),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_bsp_up_to_rounding(ranks: RankPool, name: str) -> None:
    world_size, run = CASES[name]

    served = ranks.run(train, world_size, run)
    reduced = ranks.run(train, world_size, replace(run, sync="bsp", wrapped=True))[0]

    assert len(reduced) == 51
    for mine in served:
        assert len(mine) == len(reduced)
        assert max(map(relative_error, mine, reduced)) <= 1e-9
    assert served[0] == served[-1]


WRONG = {
    "in turns": "two optimizers step the same parameters",
    "clamped": "weights were changed since the optimizer's last step",
    "fails": "failed: .*this optimizer has had enough",
    "left out": "a gradient scaler found an infinite or NaN gradient",
    "unwatched": "no model was given to stride.watch",
    "unfrozen": "was frozen when stride.watch.. got it",
    "several": "one optimizer with several parameter groups",
    "twice": "one step.. per batch",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_servers_cannot_know_is_refused_and_said(ranks: RankPool, wrong: str) -> None:
    for text in ranks.run(loop, 2, wrong):
        assert re.search(WRONG[wrong], text), text


def test_a_second_model_may_have_fewer_parameters_than_servers(ranks: RankPool) -> None:
    for places in ranks.run(smaller, 2):
        assert set(places[:-1]) == {0, 1}
        assert places[-1] == 0


def test_a_second_set_of_servers_is_refused(ranks: RankPool) -> None:
    for text in ranks.run(two, 2):
        check_message(text, "close()")


def test_servers_that_do_not_start_are_not_waited_for(ranks: RankPool) -> None:
    for text in ranks.run(broken, 2):
        check_message(text)
