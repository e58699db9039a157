"""Property: a trace loses nothing but what a crash cut off, and replays to the same bytes."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.control.advance import advance
from evenstride.core.control.events import Event, Exchanged, FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.errors import TraceError
from evenstride.trace.codec import TraceWriter, decode, dumps, encode
from evenstride.trace.decision_replay import replay
from evenstride.trace.read import LineTail, read_records
from tests.messages import raises_message

seconds = st.floats(1e-4, 10.0)
times = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6)
observations = st.builds(
    lambda times, **values: Observation(
        busy_s=tuple(busy_s for busy_s, _ in times),
        wait_s=tuple(wait_s for _, wait_s in times),
        **values,
    ),
    worker=st.integers(0, 2),
    share=st.integers(0, 40),
    first_step=st.integers(0, 10**6),
    times=times,
    data_s=seconds,
    modelled=st.booleans(),
)
exchanges = st.lists(st.lists(observations, max_size=6).map(tuple), max_size=8)
specs = st.sampled_from(["uniform", "adaptive", "dynamic-batching", "static:10,20,30"])


def _events(history: list[tuple[Observation, ...]]) -> list[Event]:
    workers = tuple(Worker(f"host/{rank}") for rank in range(3))
    formed = FleetFormed(0, 0, 60, workers)
    return [
        formed,
        *(
            Exchanged(2 * n, 2 * n + 1, Measurements.of(seen), decision_s=0.07 * (n % 3))
            for n, seen in enumerate(history, 1)
        ),
    ]


def _write(path: Path, spec: str, events: list[Event]) -> None:
    control = Control(policy_from_spec(spec))
    with TraceWriter(path, {"policy": spec}) as writer:
        for number, event in enumerate(events):
            control, instructions = advance(control, event)
            writer.event(0.1 * number, event, instructions)


@given(history=exchanges)
def test_every_event_survives_the_codec(history: list[tuple[Observation, ...]]) -> None:
    for event in _events(history):
        assert decode(encode(event)) == event


@given(spec=specs, history=exchanges)
def test_a_replay_decides_the_same_byte_for_byte(
    spec: str, history: list[tuple[Observation, ...]]
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        _write(path, spec, _events(history))

        outcome = replay(path)

    assert outcome.identical
    assert outcome.events == len(history) + 1


@given(spec=specs, history=exchanges, data=st.data())
def test_a_trace_cut_at_any_byte_reads_and_replays_up_to_there(
    spec: str, history: list[tuple[Observation, ...]], data: st.DataObject
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        _write(path, spec, _events(history))
        whole, records = path.read_bytes(), list(read_records(path))
        cut = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:cut])

        left = list(read_records(path))

        assert left == records[: len(left)]
        assert len(left) == whole[:cut].count(b"\n")
        assert replay(path).identical


@given(history=exchanges, data=st.data())
def test_a_run_that_continues_a_cut_trace_is_readable(
    history: list[tuple[Observation, ...]], data: st.DataObject
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        _write(path, "adaptive", _events(history))
        whole = path.read_bytes()
        cut = whole[: data.draw(st.integers(0, len(whole)))]
        path.write_bytes(cut)
        before = len(list(read_records(path)))

        _write(path, "uniform", _events(history))

        added = len(list(read_records(path))) - 1 - 2 * (len(history) + 1)
        # A record of which only the line end was lost is whole again.
        only_line_end_lost = bool(cut) and whole.startswith(cut + b"\n")
        assert added == before + only_line_end_lost
        assert replay(path).identical


@given(history=exchanges.filter(bool), pieces=st.lists(st.integers(1, 400), min_size=1))
def test_a_follower_sees_every_record_once(
    history: list[tuple[Observation, ...]], pieces: list[int]
) -> None:
    with TemporaryDirectory() as folder:
        path, growing = Path(folder, "whole.jsonl"), Path(folder, "growing.jsonl")
        _write(path, "adaptive", _events(history))
        whole, tail, seen, at = path.read_bytes(), LineTail(growing), [], 0
        assert tail.records() == []

        for size in [*pieces, len(whole)]:
            with growing.open("ab") as file:
                file.write(whole[at : at + size])
            at += size
            seen += tail.records()

        assert seen == list(read_records(path))


def test_a_tampered_decision_shows_in_the_replay(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    _write(path, "uniform", _events([]))
    path.write_text(path.read_text().replace("[20,20,20]", "[20,21,19]"))

    outcome = replay(path)

    assert not outcome.identical
    assert "[20,21,19]" in outcome.differences[0][1]
    assert "[20,20,20]" in outcome.differences[0][2]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    _write(path, "uniform", _events([(), ()]))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], lines[2][:20] + "\n", *lines[3:]]))

    with raises_message(TraceError, "line 3"):
        list(read_records(path))


@pytest.mark.parametrize("text", ["hello\nworld\n", "{}\n", '{"kind":"event"}\n'])
def test_something_else_than_a_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)

    with pytest.raises(TraceError):
        list(read_records(path))


def test_a_trace_of_a_later_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"kind":"header","format":99}\n')

    with raises_message(TraceError, "'99'"):
        list(read_records(path))


def test_a_run_is_named_by_its_folder_or_its_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    _write(path, "uniform", _events([]))

    assert list(read_records(tmp_path)) == list(read_records(path))
    with raises_message(TraceError, "EVENSTRIDE_TRACE"):
        list(read_records(tmp_path / "elsewhere"))


@pytest.mark.parametrize("plain", [{"type": "Nonsense"}, {"type": "SetShares", "effective": 1}, {}])
def test_a_record_that_is_no_event_is_refused(plain: dict[str, object]) -> None:
    with pytest.raises(TraceError):
        decode(plain)


def test_numbers_that_json_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        dumps(float("nan"))
