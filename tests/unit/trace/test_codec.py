"""Events that are written wrongly are refused."""

from __future__ import annotations

import pytest

from evenstride.core.control.events import Exchanged, FleetFormed
from evenstride.core.fleet import Worker
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.errors import TraceError
from evenstride.trace.codec import decode, encode
from tests.messages import raises_message


@pytest.mark.parametrize("name", ["busy_s", "wait_s"])
def test_an_observation_that_lacks_a_time_of_a_step_is_refused(name: str) -> None:
    seen = Observation(0, 32, 4, busy_s=(0.2, 0.3), wait_s=(0.1, 0.0))
    event = Exchanged(6, 7, Measurements.of([seen]))
    plain = encode(event)
    assert decode(plain) == event

    plain["observations"][0][name].pop()

    with raises_message(TraceError):
        decode(plain)


@pytest.mark.parametrize("value", [None, True, "1", [1.0], -1.0, float("nan"), float("inf"), 1e308])
def test_a_time_of_decisions_that_is_no_duration_is_refused(value: object) -> None:
    plain = encode(Exchanged(6, 7, Measurements.of(()), decision_s=0.25))
    assert plain["decision_s"] == 0.25

    with raises_message(TraceError):
        decode({**plain, "decision_s": value})


def test_a_worker_of_a_trace_without_quanta_has_no_waves_to_be_found() -> None:
    plain = encode(FleetFormed(0, 0, 8, (Worker("host/0"),)))
    assert decode(plain) == FleetFormed(0, 0, 8, (Worker("host/0"),))

    del plain["workers"][0]["quantum"]

    event = decode(plain)
    assert isinstance(event, FleetFormed)
    assert event.workers[0].quantum == 1
