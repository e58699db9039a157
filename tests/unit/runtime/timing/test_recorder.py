"""Finished steps become observations that may each be judged as a whole."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.control.schedule import ToleranceBand
from evenstride.runtime.timing.recorder import Recorder
from evenstride.runtime.timing.step_timer import StepRecord


def _step(
    step: int, busy_s: float = 1.0, share: int = 8, wait_s: float = 0.5, *, modelled: bool = True
) -> StepRecord:
    return StepRecord(step, share, busy_s, wait_s, 0.25, 0.125, 0.0625, modelled)


def _recorder() -> tuple[Recorder, list[str]]:
    asked: list[str] = []
    return Recorder(3, lambda: asked.append("asked")), asked


def test_consecutive_steps_at_one_share_are_one_observation() -> None:
    recorder, _ = _recorder()
    for step in range(4, 7):
        recorder.append(_step(step, busy_s=float(step)))

    (seen,) = recorder.take()

    assert (seen.worker, seen.share, seen.first_step, seen.modelled) == (3, 8, 4, True)
    assert seen.busy_s == (4.0, 5.0, 6.0)
    assert seen.wait_s == (0.5, 0.5, 0.5)
    assert (seen.data_s, seen.outside_s, seen.control_wait_s) == (0.75, 0.375, 0.1875)


def test_a_step_is_taken_once() -> None:
    recorder, _ = _recorder()
    recorder.append(_step(0))

    assert len(recorder.take()) == 1
    assert len(recorder.take()) == 0


def test_times_are_reported_to_a_tenth_of_a_microsecond() -> None:
    recorder, _ = _recorder()
    recorder.append(_step(0, busy_s=1 / 3, wait_s=2 / 3))

    (seen,) = recorder.take()

    assert (seen.busy_s, seen.wait_s) == ((0.3333333,), (0.6666667,))


records = st.builds(
    StepRecord,
    step=st.integers(0, 4),  # gaps between the steps, summed up below
    share=st.integers(0, 2),
    busy_s=st.integers(1, 9).map(float),
    wait_s=st.integers(0, 9).map(float),
    data_s=st.integers(0, 9).map(float),
    outside_s=st.integers(0, 9).map(float),
    control_wait_s=st.integers(0, 9).map(float),
    modelled=st.booleans(),
)


@given(measured=st.lists(records, max_size=30))
def test_every_step_is_in_one_observation_with_its_own_share(measured: list[StepRecord]) -> None:
    recorder, _ = _recorder()
    recorder.expect(ToleranceBand(share=1, expected_s=5.0, part=0.2))
    step, added = 0, []
    for record in measured:
        step += 1 + max(0, record.step - 3)
        added.append(record._replace(step=step))
        recorder.append(added[-1])

    seen = recorder.take()

    flat = [
        (one.first_step + offset, one.share, one.modelled, busy_s, one.wait_s[offset])
        for one in seen
        for offset, busy_s in enumerate(one.busy_s)
    ]
    assert flat == [(r.step, r.share, r.modelled, r.busy_s, r.wait_s) for r in added]
    for name in ("data_s", "outside_s", "control_wait_s"):
        assert sum(getattr(one, name) for one in seen) == sum(getattr(r, name) for r in added)


def test_another_share_a_gap_or_an_unmodelled_step_begins_a_new_observation() -> None:
    recorder, _ = _recorder()
    steps = [_step(0, modelled=False), _step(1), _step(2), _step(3, share=9), _step(5, share=9)]
    for record in steps:
        recorder.append(record)

    assert [seen.steps for seen in recorder.take()] == [1, 2, 1, 1]


def test_two_slow_steps_ask_once_and_begin_a_new_observation() -> None:
    recorder, asked = _recorder()
    recorder.expect(ToleranceBand(share=8, expected_s=1.0, part=0.2))

    for step, busy_s in enumerate([1.0, 1.1, 1.5, 1.6, 1.7]):
        recorder.append(_step(step, busy_s))
        assert len(asked) == (step >= 3)

    assert [seen.busy_s for seen in recorder.take()] == [(1.0, 1.1), (1.5, 1.6, 1.7)]


def test_a_lone_spike_asks_nothing() -> None:
    recorder, asked = _recorder()
    recorder.expect(ToleranceBand(share=8, expected_s=1.0, part=0.2))

    for step, busy_s in enumerate([1.0, 5.0, 1.0, 5.0, 1.0]):
        recorder.append(_step(step, busy_s))

    assert not asked


def test_one_fast_step_asks_at_once() -> None:
    recorder, asked = _recorder()
    recorder.expect(ToleranceBand(share=8, expected_s=1.0, part=0.2))

    recorder.append(_step(0))
    recorder.append(_step(1, busy_s=0.5))

    assert asked == ["asked"]
    assert [seen.busy_s for seen in recorder.take()] == [(1.0,), (0.5,)]


def test_a_new_band_lets_it_ask_again() -> None:
    recorder, asked = _recorder()
    for _ in range(2):
        recorder.expect(ToleranceBand(share=8, expected_s=1.0, part=0.2))
        recorder.append(_step(0, busy_s=0.5))
        recorder.append(_step(1, busy_s=0.5))

    assert len(asked) == 2


def test_unmodelled_steps_and_other_shares_are_not_judged() -> None:
    recorder, asked = _recorder()
    recorder.expect(ToleranceBand(share=8, expected_s=1.0, part=0.2))

    recorder.append(_step(0, busy_s=0.1, modelled=False))
    recorder.append(_step(1, busy_s=0.1, share=4))

    assert not asked


def test_the_control_thread_may_take_while_it_is_being_asked() -> None:
    taken: list[int] = []

    def ask() -> None:
        thread = threading.Thread(target=lambda: taken.append(len(recorder.take())), daemon=True)
        thread.start()
        thread.join(5.0)

    recorder = Recorder(0, ask)
    recorder.expect(ToleranceBand(share=8, expected_s=1.0, part=0.2))

    recorder.append(_step(0, busy_s=0.5))

    assert taken == [1], "asking holds no lock"
