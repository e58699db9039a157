"""The trace of a real run: replayed byte for byte, and true to what every rank did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evenstride.core.control.schedule import Schedule
from evenstride.testing import RankPool
from evenstride.trace.decision_replay import replay
from evenstride.trace.read import read_records
from tests.multiproc.evaluating import compiled, traced

RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "adaptive": (2, {"policy": "adaptive", "epochs": 4}),
    "adaptive on three ranks": (3, {"policy": "adaptive", "epochs": 4}),
    "adaptive behind a deep prefetch": (
        2,
        {"policy": "adaptive", "epochs": 4, "num_workers": 2, "cold_prefetch": True},
    ),
    "dynamic batching": (2, {"policy": "dynamic-batching", "epochs": 40}),
    "given shares": (3, {"policy": "static:0,5,19", "epochs": 40}),
}


def _events(folder: Path) -> list[dict[str, Any]]:
    return [record["event"] for record in read_records(folder) if record["kind"] == "event"]


def _schedule(folder: Path) -> Schedule:
    """Return the shares of every step, as the trace tells them."""
    schedule = Schedule(())
    for record in read_records(folder):
        for decided in record.get("instructions", ()):
            if decided["type"] == "SetShares":
                schedule = schedule.decided(decided["effective"], tuple(decided["shares"]))
    return schedule


@pytest.mark.parametrize("name", RUNS)
def test_a_real_run_is_decided_again_byte_for_byte(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    world_size, plan = RUNS[name]

    by_rank = ranks.run(traced, world_size, {**plan, "trace": str(tmp_path)})

    outcome = replay(tmp_path)
    assert outcome.differences == ()
    assert outcome.events == len(_events(tmp_path)) >= 2
    schedule = _schedule(tmp_path)
    for seen in by_rank:
        assert seen == [(step, schedule.shares_at(step)) for step in range(10 * plan["epochs"])]
    reported = {
        seen["worker"] for event in _events(tmp_path) for seen in event.get("observations", ())
    }
    assert reported == set(range(world_size))


def test_the_observations_carry_the_shares_they_were_measured_at(
    ranks: RankPool, tmp_path: Path
) -> None:
    _, plan = RUNS["adaptive behind a deep prefetch"]

    ranks.run(traced, 2, {**plan, "trace": str(tmp_path)})

    schedule = _schedule(tmp_path)
    kinds = {event["type"] for event in _events(tmp_path)}
    assert kinds == {"FleetFormed", "OpeningSkipped", "Exchanged"}
    for event in _events(tmp_path):
        for seen in event.get("observations", ()):
            for step in range(seen["first_step"], seen["first_step"] + len(seen["busy_s"])):
                assert seen["share"] == schedule.shares_at(step)[seen["worker"]]


@pytest.mark.parametrize("policy", ["adaptive", "lb-bsp-cpu:predictor=last,every=1"])
def test_the_first_decision_comes_after_the_first_step_which_counts(
    ranks: RankPool, tmp_path: Path, policy: str
) -> None:
    ranks.run(traced, 2, {"policy": policy, "epochs": 4, "trace": str(tmp_path)})

    first, *_ = (event for event in _events(tmp_path) if event["type"] == "Exchanged")
    assert first["step"] == 1
    # Of later passes, the first step includes the start of the loader.
    assert _left_out(tmp_path) == {10, 20, 30}


@pytest.mark.parametrize("peeks", [False, True])
def test_the_first_step_of_a_compiled_model_does_not_count(
    ranks: RankPool, tmp_path: Path, peeks: bool
) -> None:
    """With ``peeks``, the loop first draws a batch that it does not train."""
    ranks.run(compiled, 2, str(tmp_path), peeks)

    assert 0 in _left_out(tmp_path)


def _left_out(folder: Path) -> set[int]:
    """Return the first steps of the observations that do not count."""
    seen = [one for event in _events(folder) for one in event.get("observations", ())]
    return {one["first_step"] for one in seen if not one["modelled"]}


def test_a_run_that_goes_on_with_other_workers_is_replayed_as_well(
    ranks: RankPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "run.jsonl")

    for world_size, policy in ((2, "adaptive"), (3, "dynamic-batching"), (1, "adaptive")):
        ranks.run(traced, world_size, {"policy": policy, "epochs": 4, "trace": path})

    headers = [record for record in read_records(Path(path)) if record["kind"] == "header"]
    ends = [record for record in read_records(Path(path)) if record["kind"] == "ended"]
    assert [header["world_size"] for header in headers] == [2, 3, 1]
    assert [end["summary"]["step"] for end in ends] == [40] * 3
    assert replay(Path(path)).identical
