"""What a worker itself takes, to pack and unpack, for each update with parameter servers."""

from __future__ import annotations

import pytest

from tests.unit.sim.engine.test_mode_runs_modes import EVEN, FAST, SLOW, ran


def test_what_a_worker_packs_itself_comes_before_the_servers_update() -> None:
    handled = [{**FAST, "handling_s": 0.1}, {**SLOW, "handling_s": 0.4}]

    served = ran("bsp-ps", EVEN, workers=handled)
    reduced = ran("bsp", EVEN, workers=handled)

    assert served.time_s == pytest.approx(4 * (1.6 + 0.4))
    assert served.workers[0].wait_s == pytest.approx(4 * 0.4)
    assert reduced.time_s == pytest.approx(4 * 1.6)


def test_what_a_worker_packs_itself_is_a_part_of_its_period() -> None:
    handled = [{**FAST, "handling_s": 0.1}, {**SLOW, "handling_s": 0.4}]

    fast, slow = ran("asp", EVEN, workers=handled, steps=50).workers

    assert fast.period_s == pytest.approx(1.7, rel=0.01)  # its end is cut
    assert slow.period_s == pytest.approx(2.0, rel=0.01)
