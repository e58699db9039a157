"""Recordings of spot machines as a user gives them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evenstride.cli.plan_inputs import with_preemptions
from evenstride.errors import ConfigError
from evenstride.planner.search.candidates import with_recorded
from evenstride.planner.search.training_forecast import ClusterChoice, outlook
from evenstride.planner.spot_losses import WAITS_DRIFT, SaveCosts
from evenstride.planner.spot_recordings import (
    EXAMPLE,
    from_recorded,
    read_recording,
    recorded_transience,
    waits_s,
)
from evenstride.sim.scenario.recordings import SpotTrace, load_spot_traces, machines
from tests.messages import raises_message
from tests.unit.planner.kinds import kind, task

UP = [0, 2, 2, 1, 1, 2, 3, 2, 0, 1, 2, 1] * 10


def written(folder: Path, text: str, name: str = "seen.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def looks(up: list[int], gap_s: float = 600.0) -> str:
    return "\n".join(["at_s,up", *(f"{n * gap_s:g},{one}" for n, one in enumerate(up))])


def test_looks_are_read_as_they_were_recorded(tmp_path: Path) -> None:
    expected = machines([SpotTrace("x", 600.0, np.array(UP))])
    csv = written(tmp_path, "# seen by a script\n\n" + looks(UP) + "\n")
    as_json = written(
        tmp_path, json.dumps({"metadata": {"gap_seconds": 600}, "data": UP}), "seen.json"
    )

    for path in (csv, as_json):
        found = read_recording(path)
        assert found.gap_s == 600.0
        assert found.who.tolist() == expected.who.tolist()


def test_rates_and_waits_are_those_of_the_recording(tmp_path: Path) -> None:
    expected = machines([SpotTrace("x", 600.0, np.array(UP))])

    found = recorded_transience(written(tmp_path, looks(UP)))

    assert found.rates_per_s == from_recorded(expected).rates_per_s
    assert found.waits_s == waits_s(expected, 2)
    assert set(found.waits_s) == {0.0, 1200.0, 600.0}
    assert found.reason.startswith("seen.csv: ")


def test_lives_are_read_one_by_one(tmp_path: Path) -> None:
    """Three machines: one that stays, one lost after 2 h, and its successor an hour later."""
    text = "came_s,gone_s\n0,\n600,7800\n11400,15000\n15060,\n"

    found = read_recording(written(tmp_path, text))

    assert found.gap_s == 60.0
    assert found.came.tolist() == [0, 10, 190, 251]
    assert found.gone.tolist() == [len(found.who), 130, 250, len(found.who)]
    assert found.slot.tolist() == [0, 1, 1, 1]
    assert (found.who >= 0).sum(axis=1)[[5, 100, 150, 200]].tolist() == [1, 2, 1, 2]
    assert found.lives().age_s.tolist() == [119.5 * 60, 59.5 * 60, 60.0]
    assert recorded_transience(written(tmp_path, text)).waits_s == (3600.0, 60.0)


def test_lives_may_be_given_in_seconds_since_1970(tmp_path: Path) -> None:
    lives = "came_s,gone_s\n{},{}\n{},{}\n{},{}\n"
    times_s = (0, 36_000, 600, 7800, 11_400, 15_000)

    plain, since = (
        recorded_transience(written(tmp_path, lives.format(*(start + t for t in times_s))))
        for start in (0, 1_700_000_000)
    )

    assert since == plain


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("at_s,up\n0,1\n600,x\n1200,1.5\n1800", ("line 3", "'x'", "line 4")),
        ("at_s,up\n0,1\n600,1\n# why\n900,0\n1500,1", ("line 5", "300 s", "600 s")),
        ("at_s,up\n0,1\n600,-1", ("line 3", "'-1'")),
        ("came_s,gone_s\n0,10\n50,20", ("line 3", "20 s", "50 s")),
        ("came_s,gone_s\nnan,10\n50,20", ("line 2", "'nan'")),
        ("when,what\n0,1", ("at_s",)),
        ("", ()),
        ("at_s,up\n0,1", ()),
        ("at_s,up\n0,1\n0,1", ("line 3", "0 s")),
        ('{"metadata": 3}', ()),
        ('{"metadata": {"gap_seconds": 60},\n "data": [1 2]}', ("line 2", "JSON")),
        ('{"metadata": {"gap_seconds": 0}, "data": [1, 2]}', ("gap_seconds",)),
        ("at_s,up\n0,1\n600,1000000000", ("line 3", "1000000000", "10,000")),
        ('{"metadata": {"gap_seconds": 60}, "data": [1, 1000000000]}', ("1,000,000,000",)),
        ('{"metadata": ' + "[" * 100_000, ()),
        ("at_s,up\n0,0\n600,0", ()),
        ("at_s,up\n0,0\n600,1\n1200,1", ()),
        ("at_s,up\n0,4\n600,4\n1200,5", ()),
    ],
)
def test_an_invalid_line_is_refused_with_its_number(
    tmp_path: Path, text: str, reported: tuple[str, ...]
) -> None:
    with raises_message(ConfigError, *reported):
        recorded_transience(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "losses", "hours"),
    [
        (EXAMPLE, 1, 11 / 6),
        ("at_s,up\n0,4\n600,3\n", 1, 7 / 6),
        ("came_s,gone_s\n0,7800\n600,\n", 1, None),
        ("at_s,up\n0,4\n600,3\n1200,4\n1800,2\n2400,4\n", 3, 17 / 6),
    ],
)
def test_losses_of_machines_that_were_there_from_the_start_count(
    tmp_path: Path, text: str, losses: int, hours: float | None
) -> None:
    """As the example that is printed has it, and those of the documentation."""
    found = recorded_transience(written(tmp_path, text))

    mean_h = found.lifetime.mean_left_s(0.0) / 3600
    if hours is not None:
        assert mean_h == pytest.approx(hours / losses)
    assert 0.0 <= found.rates_per_s[0] < found.rates_per_s[-1]
    assert found.losses_per_h.low <= 1 / mean_h <= found.losses_per_h.high
    assert f"{losses} preemption" in found.reason


def test_the_examples_of_the_documentation_can_be_used(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "catalogue.md"
    blocks = re.findall(r"```\n(#[^`]*)```", page.read_text(encoding="utf-8"))

    assert len(blocks) == 2
    for block in blocks:
        assert recorded_transience(written(tmp_path, block)).rates_per_s[-1] > 0


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with raises_message(ConfigError):
        recorded_transience(tmp_path / "none.csv")


def test_recordings_are_of_the_types_they_are_given_for(tmp_path: Path) -> None:
    calm, wild = (written(tmp_path, looks(up), name) for up, name in (
        ([0] + [1] * 200 + [0, 1], "calm.csv"), (UP, "wild.csv")
    ))  # fmt: skip
    some = [kind("a", losses_per_h=0.1), kind("b", losses_per_h=0.1), kind("a"), kind("c")]

    named = with_preemptions(some, [f"{calm}:b", str(wild)], spot=True)

    assert named[0].transience == recorded_transience(wild)
    assert named[1].transience == recorded_transience(calm)
    assert named[2:] == tuple(some[2:])
    only = with_recorded(some, {"b": recorded_transience(calm)})
    assert only[0] == some[0]


@pytest.mark.parametrize(
    ("recordings", "spot", "reported"),
    [
        (["{}"], False, ("--preemptions", "--spot")),
        (["{}:a", "{}:a"], True, ()),
        (["{}", "{}"], True, ()),
        (["{}:z"], True, ()),
        (["{}:"], True, ()),
    ],
)
def test_recordings_of_types_outside_the_plan_are_refused(
    tmp_path: Path, recordings: list[str], spot: bool, reported: tuple[str, ...]
) -> None:
    path = written(tmp_path, looks(UP))
    some = [kind("b", losses_per_h=0.1), kind("a", losses_per_h=0.1)]
    if recordings == ["{}:"]:
        path.unlink()

    with raises_message(ConfigError, *reported):
        with_preemptions(some, [one.format(path) for one in recordings], spot=spot)


def test_waits_make_runs_longer_and_less_sure(tmp_path: Path) -> None:
    known = recorded_transience(written(tmp_path, looks(UP)))
    one = kind("a", losses_per_h=0.1)
    (waiting,) = with_recorded([one], {"": known})
    (ready,) = with_recorded([one], {"": replace(known, waits_s=())})

    long, short = (outlook(ClusterChoice((k,), (2,), 256), task()) for k in (waiting, ready))

    assert long is not None
    assert short is not None
    assert long.stretch > 1.02 * short.stretch
    assert long.time_s.high > short.time_s.high


def test_waits_are_added_to_restarts_and_keep_their_mean() -> None:
    unknown = kind("a", losses_per_h=0.1).transience
    assert unknown is not None
    one = replace(unknown, waits_s=(0.0, 60.0))
    many = replace(unknown, waits_s=tuple(float(n * n) for n in range(100)))
    saves = SaveCosts(2.0, (10.0, 20.0))

    assert saves.waiting([None, unknown]) == saves
    assert saves.waiting([one]).restart_s == (10.0, 70.0, 20.0, 80.0)
    assert saves.waiting([one]).drift == WAITS_DRIFT
    assert len(saves.waiting([many]).restart_s) == 40
    assert saves.waiting([many]).mean_restart_s == pytest.approx(15.0 + sum(many.waits_s) / 100)


@pytest.mark.data
def test_a_recorded_zone_can_be_given_as_it_is(tmp_path: Path, data_root: Path) -> None:
    if not (data_root / "traces" / "spot-traces.json.gz").is_file():
        pytest.skip("no spot traces")
    load_spot_traces.cache_clear()
    trace = next(t for t in load_spot_traces() if t.name.endswith("us-west-2c_v100_1"))
    load_spot_traces.cache_clear()
    text = json.dumps({"metadata": {"gap_seconds": trace.gap_s}, "data": trace.up.tolist()})

    found = recorded_transience(written(tmp_path, text, "zone.json"))

    assert found.rates_per_s == from_recorded(machines([trace])).rates_per_s
