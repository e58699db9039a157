"""Whatever a single field of a trace was changed into, there is a view or an error of our own."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from evenstride.cli.main import app
from evenstride.errors import EvenstrideError, TraceError
from evenstride.planner.workload.from_trace import profile_of_run
from tests.messages import check_message
from tests.unit.planner.recordings import recorded as simulated_run
from tests.unit.report.virtual import VirtualRun

Place = tuple[str | int, ...]
NOTES: tuple[dict[str, Any], ...] = (
    {"kind": "workload", "parameters": 10, "device": "cpu", "samples": 480},
    {"kind": "pass", "at_s": 0.0, "step": 0, "epochs": 0.0, "samples": 480, "global_batch": 48},
    {"kind": "metric", "at_s": 0.6, "step": 4, "epochs": 0.4, "name": "loss", "value": 2.0},
    {"kind": "noise", "at_s": 0.7, "step": 5, "loss": 1.5},
    {"kind": "alert", "at_s": 0.8, "worker": "host/1", "step": 6, "reason": "it is slow"},
)
CHANGED: dict[str, Any] = {
    "type": "MembersChanged",
    "step": 8,
    "effective": 10,
    "happenings": [{"worker": "host/1", "change": "notice", "why": "it said so"}],
    "save_s": None,
}
HUGE = int("9" * 400)
DEEP = "deep"
VALUES: tuple[Any, ...] = (
    *(None, "x", -1, [], {}, 1e308, HUGE, 5e-324, True, 0),
    *(float("inf"), float("nan"), 2**63, -1e308, 2**40, DEEP),
)


def recorded(folder: Path) -> list[dict[str, Any]]:
    run = VirtualRun(folder / "trace.jsonl", lambda _: (1.0, 0.5), workers=2, batch=48)
    run.begin()
    for note in NOTES:
        run.writer.record(note["kind"], **{key: one for key, one in note.items() if key != "kind"})
    run.run(8)
    run.writer.record("event", at_s=run.clock_s, event=CHANGED)
    run.run(4)
    run.turn(32)
    run.run(8)
    summed = [{"busy_s": 1.0, "waited_s": 0.0, "caused_s": 0.0}] * 2
    run.end(step=20, workers=summed)
    return [json.loads(line) for line in run.writer.path.read_text().splitlines()]


def representative(records: list[dict[str, Any]]) -> Iterator[int]:
    """Yield the place of the first record of each kind and type."""
    seen = set()
    for number, record in enumerate(records):
        types = [one["type"] for one in record.get("instructions", [])]
        sort = record["kind"], record.get("event", {}).get("type"), *types
        if sort not in seen:
            seen.add(sort)
            yield number


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yield where a field is; of lists, only their first one."""
    if place:
        yield place
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:1] if isinstance(value, list) else ())
    )
    for key, one in items:
        yield from places(one, (*place, key))


def changed(record: dict[str, Any], place: Place, value: Any) -> str:
    record = copy.deepcopy(record)
    inner: Any = record
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return json.dumps(record).replace(json.dumps(DEEP), "[" * 900 + "]" * 900)


def shown(
    records: list[dict[str, Any]], number: int, line: str, folder: Path, ways: slice = slice(None)
) -> None:
    """Show a trace with one other line, in some ways, and fail where one does not end well."""
    lines = [json.dumps(one) for one in records]
    path = folder / "trace.jsonl"
    path.write_text("\n".join([*lines[:number], line, *lines[number + 1 :]]) + "\n")
    page, events = str(folder / "page.html"), str(folder / "events.json")
    commands = (
        ["top", str(path), "--once"],
        ["report", str(path), "-o", page, "--json"],
        ["top", str(path), "--json"],
        ["trace", str(path), "-o", events],
    )
    for command in commands[ways]:
        error = CliRunner().invoke(app, command, env={"COLUMNS": "100"}).exception
        refused = error is None or isinstance(error, EvenstrideError)
        assert refused, f"{command[0]} of {line[:300]}: {error!r}"


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return recorded(tmp_path_factory.mktemp("recorded"))


def test_every_field_may_be_anything(records: list[dict[str, Any]], tmp_path: Path) -> None:
    """Each field takes the next of the values, so that all come in turn, and two of the ways."""
    cases = [(n, place) for n in representative(records) for place in places(records[n])]
    assert len(cases) > 100
    for turn, (number, place) in enumerate(cases):
        value = VALUES[turn % len(VALUES)]
        ways = slice(0, 2) if turn // len(VALUES) % 2 else slice(2, 4)
        shown(records, number, changed(records[number], place, value), tmp_path, ways)


KNOWN: tuple[tuple[str, Place, Any], ...] = (
    ("header", ("started_unix_s",), HUGE),
    ("header", ("at_s",), HUGE),
    ("header", ("deep",), DEEP),
    ("pass", ("step",), float("inf")),
    ("pass", ("epochs",), HUGE),
    ("FleetFormed", ("event", "step"), HUGE),
    ("FleetFormed", ("event", "global_batch"), {}),
    ("FleetFormed", ("event", "global_batch"), None),
    ("FleetFormed", ("event", "global_batch"), "x"),
    ("ended", ("summary", "step"), HUGE),
    ("metric", ("step",), HUGE),
    ("metric", ("step",), 1e308),
    ("noise", ("step",), HUGE),
    ("SetShares", ("instructions", 0, "effective"), None),
    ("SetShares", ("instructions", 0, "effective"), "x"),
    ("SetShares", ("instructions", 0, "shares"), [None]),
    ("SetShares", ("instructions", 0, "shares"), "x"),
    ("Exchanged", ("at_s",), 5e-324),
    ("Exchanged", ("event", "observations", 0, "busy_s", 0), 5e-324),
    ("Exchanged", ("event", "memory", 0, "peak_bytes"), "x"),
)


@pytest.mark.parametrize(
    ("sort", "place", "value"), KNOWN, ids=[f"{one[0]}-{n}" for n, one in enumerate(KNOWN)]
)
def test_values_that_once_caused_a_traceback_are_handled(
    records: list[dict[str, Any]], tmp_path: Path, sort: str, place: Place, value: Any
) -> None:
    for number in representative(records):
        types = [one["type"] for one in records[number].get("instructions", [])]
        kinds = records[number]["kind"], records[number].get("event", {}).get("type"), *types[:1]
        if sort in kinds:
            shown(records, number, changed(records[number], place, value), tmp_path)
            return
    raise AssertionError(f"there is no {sort}")


def test_values_as_far_apart_as_numbers_go_are_drawn(
    records: list[dict[str, Any]], tmp_path: Path
) -> None:
    number = next(n for n, one in enumerate(records) if one["kind"] == "metric")
    lines = [changed(records[number], ("value",), value) for value in (1e308, -1e308, 1e308)]
    shown(records, number, "\n".join(lines), tmp_path)


@pytest.fixture(scope="module")
def plannable(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("plannable")
    simulated_run(folder, np.full((2, 20), [[0.1], [0.2]]), (32, 16), steps_each=10)
    lines = (folder / "trace.jsonl").read_text().splitlines()
    norms = {"kind": "noise", "at_s": 1.0, "step": 5, "loss": 1.5, "parts": 2, "batch": 48}
    return [*map(json.loads, lines), {**norms, "local": 2.0, "mean": 1.0}]


def test_a_plan_from_a_changed_trace_is_made_or_refused(
    plannable: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [json.dumps(one) for one in plannable]
    cases = [(n, place) for n in representative(plannable) for place in places(plannable[n])]
    for number, place in cases:
        for value in VALUES:
            line = changed(plannable[number], place, value)
            path.write_text("\n".join([*lines[:number], line, *lines[number + 1 :]]) + "\n")
            try:
                profile_of_run(path, ["box"])
            except EvenstrideError:
                continue
            except Exception as error:
                raise AssertionError(f"{place} was changed to {str(value)[:40]}") from error


def test_the_plan_command_names_the_trace_whose_observation_is_no_object(
    plannable: list[dict[str, Any]], tmp_path: Path
) -> None:
    number = next(n for n, one in enumerate(plannable) if "observations" in one.get("event", {}))
    lines = [json.dumps(one) for one in plannable]
    lines[number] = changed(plannable[number], ("event", "observations", 0), 3)
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")

    error = CliRunner().invoke(app, ["plan", str(path), "--as", "box"]).exception

    assert isinstance(error, TraceError)
    check_message(str(error))
