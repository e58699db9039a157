"""Training over parameter servers, on real processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenstride.testing import RankPool
from tests.multiproc.serving import Run, train
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
