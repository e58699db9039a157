"""Traces kept from earlier versions are still decided alike, byte for byte.

``python -m tests.golden.recording`` makes them again when decisions are meant to change.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from evenstride.errors import TraceError
from evenstride.trace.codec import dumps
from evenstride.trace.decision_replay import Replay, replay
from evenstride.trace.read import read_records
from tests.golden.recording import HERE, STORIES, record

every_story = pytest.mark.parametrize("name", STORIES)


def _lines(name: str) -> list[bytes]:
    return (HERE / f"{name}.jsonl").read_bytes().splitlines(keepends=True)


def _replayed(folder: Path, lines: list[bytes]) -> Replay:
    path = folder / "trace.jsonl"
    path.write_bytes(b"".join(lines))
    return replay(path)


@every_story
def test_a_kept_trace_is_decided_again_byte_for_byte(name: str) -> None:
    outcome = replay(HERE / f"{name}.jsonl")

    assert outcome.differences == ()
    assert outcome.identical
    assert outcome.events == 1 + STORIES[name].exchanges + STORIES[name].skips_opening


@every_story
def test_the_same_story_is_recorded_in_the_same_bytes(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"

    record(name, path)

    assert path.read_bytes() == (HERE / f"{name}.jsonl").read_bytes()


def test_every_kept_trace_has_its_story() -> None:
    assert {path.stem for path in HERE.glob("*.jsonl")} == set(STORIES)


def test_the_kept_traces_show_all_that_a_run_can_decide() -> None:
    records = [r for name in STORIES for r in read_records(HERE / f"{name}.jsonl")]
    events = {r["event"]["type"] for r in records if r["kind"] == "event"}
    decided = [i for r in records if r["kind"] == "instructions" for i in r["instructions"]]

    assert events == {"FleetFormed", "Exchanged", "OpeningSkipped"}
    assert {i["type"] for i in decided} == {"SetShares", "KeepShares", "Expect", "ExchangeAfter"}
    assert {i["blocking"] for i in decided if i["type"] == "ExchangeAfter"} == {True, False}


def test_another_byte_in_a_decision_is_noticed(tmp_path: Path) -> None:
    lines = _lines("adaptive")
    moved = next(k for k, line in enumerate(lines) if b"finishes last" in line)
    start = lines[moved].index(b"[{")
    unnoticed = []

    # Every seventh byte: names, shares, reasons.
    for at in range(start, len(lines[moved].rstrip()), 7):
        line, byte = lines[moved], lines[moved][at]
        other = b"%d" % ((byte - 47) % 10) if chr(byte).isdigit() else b"x"
        changed = line[:at] + (b"y" if byte == ord(b"x") else other) + line[at + 1 :]
        try:
            outcome = _replayed(tmp_path, [*lines[:moved], changed, *lines[moved + 1 : moved + 3]])
        except TraceError:
            continue
        if outcome.identical:
            unnoticed.append(changed)

    assert unnoticed == []


def test_a_difference_names_its_event_and_shows_both_decisions(tmp_path: Path) -> None:
    lines = _lines("dynamic-batching")
    moved = next(k for k, line in enumerate(lines[5:], 5) if b'"SetShares"' in line)
    true = re.search(rb'"shares":\[(\d+),(\d+)', lines[moved])
    assert true is not None
    false = b'"shares":[%d,%d' % (int(true[1]) + 1, int(true[2]) - 1)
    lines[moved] = lines[moved].replace(true[0], false)

    outcome = _replayed(tmp_path, lines)

    (difference,) = outcome.differences
    number, recorded, replayed = difference
    assert number == (moved - 2) // 2, "header, then an event and its instructions each"
    assert recorded.replace(false.decode(), true[0].decode()) == replayed


def test_another_measurement_gives_another_decision(tmp_path: Path) -> None:
    lines = _lines("adaptive")
    reported = json.loads(lines[5])  # of the second step, because the first one is not modelled
    reported["event"]["observations"][1]["busy_s"][0] *= 2

    outcome = _replayed(tmp_path, [*lines[:5], dumps(reported).encode() + b"\n", *lines[6:]])

    assert not outcome.identical, "a replay decides on what is in the trace"


def test_a_decision_that_is_missing_in_the_middle_is_noticed(tmp_path: Path) -> None:
    lines = _lines("adaptive")

    with pytest.raises(TraceError):
        _replayed(tmp_path, [*lines[:4], *lines[5:]])


@every_story
def test_a_torn_last_record_is_left_out_and_the_rest_is_compared(name: str, tmp_path: Path) -> None:
    lines = _lines(name)[:-1]  # the last record of a run decides nothing
    torn = [*lines[:-1], lines[-1][: len(lines[-1]) // 2]]

    outcome = _replayed(tmp_path, torn)

    assert outcome.identical
    assert outcome.events == replay(HERE / f"{name}.jsonl").events
    assert len(list(read_records(tmp_path))) == len(lines) - 1


@pytest.mark.parametrize(
    ("version", "reported"),
    [
        *((version, r"\(up to 1\); upgrade it") for version in ("2", "99")),
        *(
            (text, "is not written by any version of evenstride")
            for text in ('"1"', "null", "1.5", "-5", "0")
        ),
        ("true", "is not written by any version of evenstride"),
    ],
)
def test_a_version_that_is_not_known_is_refused(
    version: str, reported: str, tmp_path: Path
) -> None:
    lines = _lines("static")
    lines[0] = lines[0].replace(b'"format":1', f'"format":{version}'.encode())

    with pytest.raises(TraceError, match=rf"line 1: trace format .* {reported}"):
        _replayed(tmp_path, lines)


def test_a_trace_whose_policy_is_not_named_cannot_be_replayed(tmp_path: Path) -> None:
    lines = _lines("static")
    lines[0] = lines[0].replace(b'"policy"', b'"prophet"')

    with pytest.raises(TraceError, match="names no policy"):
        _replayed(tmp_path, lines)
