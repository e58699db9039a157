"""What is remembered of workers: who is recognised by it, how surely, and what is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evenstride.core.fleet import Worker
from evenstride.core.membership import worker_profiles
from evenstride.core.membership.worker_profiles import WorkerProfile, merged, profiles_of, recalled
from evenstride.core.time_model.estimates import CurveEstimates, Estimate
from tests.messages import raises_message


def _profile(host: str = "h", slot: int | None = 0, per_sample_s: float = 0.01) -> WorkerProfile:
    curve = (0.1, per_sample_s, 0.0, 0.0, 0.0)
    return WorkerProfile(host, "cpu x", slot, f"{host}/{slot}", curve, 0.01, 7)


def _worker(host: str = "h", slot: int | None = 0, device: str = "cpu x") -> Worker:
    return Worker(f"{host}/{slot}", device=device, slot=slot)


def _recalled(estimate: Estimate, workers: list[Worker], known: list[WorkerProfile]) -> Estimate:
    found = recalled(estimate.steps, workers, known)
    curves = CurveEstimates(found.curves).times(1.0, found.doubt**2)
    after = estimate.knowing(found.ranks, curves, found.noise, found.steps)
    return replace(after, seen=after.seen.shaped(found.ranks, found.quanta, found.cliffs))


def _profiles_of(workers: list[Worker], found: Estimate) -> tuple[WorkerProfile, ...]:
    rows, seen = found.now.rows, found.seen
    return profiles_of(workers, rows, found.noise, found.steps, seen.quantum, seen.cliffs)


def _slopes(workers: list[Worker], known: list[WorkerProfile]) -> list[float]:
    found = _recalled(Estimate.unknown(len(workers)), workers, known)
    return [round(float(slope), 6) for slope in found.now.rows[1]]


@pytest.mark.parametrize(
    "change",
    [
        {"curve": [0.1, 0.01, 0.0, 0.0]},
        {"curve": [0.1, 0.01, 0.0, 0.0, 0.0, 0.0]},
        {"curve": [0.1, 0.01, 0.0, 0.0, float("inf")]},
        {"curve": [0.1, 0.0, 0.0, 0.0, 0.0]},
        {"curve": [0.1, -0.01, 0.0, 0.0, 0.0]},
        {"curve": 3},
        {"noise": float("nan")},
        {"noise": 0.0},
        {"steps": 0},
        {"quantum": 0},
        {"cliff": [1.0, 2.0]},
        {"cliff": [1.0, 2.0, -1.0]},
        {"what": "is this"},
    ],
    ids=str,
)
def test_an_invalid_time_curve_is_refused(change: dict[str, Any]) -> None:
    sound = _profile().to_plain()
    assert WorkerProfile.from_plain(sound) == _profile()

    with raises_message(ValueError):
        WorkerProfile.from_plain({**sound, **change})


def test_the_newer_profile_of_a_place_counts_and_comes_last() -> None:
    older, other, newer = _profile(), _profile(slot=1), _profile(per_sample_s=0.02)

    assert merged([older, other], [newer]) == (other, newer)


def test_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_profiles, "MOST_PROFILES", 2)
    many = [_profile(slot=k) for k in range(3)]

    assert merged(many[:2], many[2:]) == tuple(many[1:])


@pytest.mark.parametrize(
    ("worker", "doubt"),
    [(_worker(), 0.05), (_worker(slot=5), 0.15), (_worker("elsewhere"), 0.3)],
    ids=["same", "same host", "elsewhere"],
)
def test_the_less_alike_the_more_doubt(worker: Worker, doubt: float) -> None:
    found = _recalled(Estimate.unknown(1), [worker], [_profile()])

    assert float(found.relative_std(np.array([30]))[0]) == pytest.approx(doubt)


def test_all_of_a_profile_is_recalled() -> None:
    workers = [_worker("x", device="gpu"), _worker()]

    found = _recalled(Estimate.unknown(2), workers, [_profile()])

    assert found.steps.tolist() == [0, 7]
    assert found.noise[1] == 0.01
    for curves in (found.now, *found.anchors):
        assert curves.rows[:2, 1].tolist() == pytest.approx([0.1, 0.01])
        assert curves.rows[:, 0].tolist() == [0.0] * 5
    assert [one.slot for one in _profiles_of(workers, found)] == [0]
    assert [one.host for one in _profiles_of(workers, found)] == ["h"]


def test_a_measured_worker_is_not_recalled() -> None:
    measured = _recalled(Estimate.unknown(2), [_worker(), _worker("x", device="gpu")], [_profile()])

    workers = [_worker(), _worker("x", 1)]
    found = _recalled(measured, workers, [_profile(per_sample_s=0.5)])

    assert found.now.rows[1].tolist() == pytest.approx([0.01, 0.5])


def test_the_very_place_comes_before_a_like_one() -> None:
    known = [_profile(slot=1, per_sample_s=0.03), _profile(slot=0, per_sample_s=0.02)]

    assert _slopes([_worker(slot=0), _worker(slot=1)], known) == [0.02, 0.03]


def test_equally_similar_profiles_are_assigned_in_order_and_once_each() -> None:
    known = [_profile("a", k, 0.01 * (k + 1)) for k in range(2)]

    assert _slopes([_worker("b", 7), _worker("b", 8)], known) == [0.01, 0.02]


def test_if_all_profiles_are_assigned_one_of_the_kind_is_used_again() -> None:
    assert _slopes([_worker(), _worker(slot=1), _worker("x")], [_profile()]) == [0.01] * 3


def test_a_worker_whose_device_is_not_known_is_recognised_by_its_name_alone() -> None:
    nameless = replace(_profile(), device="")

    assert _slopes([_worker(slot=1, device=""), _worker(device="")], [nameless]) == [0.0, 0.01]
