"""A trace read as far as it can be, and what could not be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evenstride.core.time_model.observation import Observation
from evenstride.errors import TraceError
from evenstride.trace.codec import dumps, encode_observation
from evenstride.trace.read import FORMAT, TraceTail, longest_record, read_records
from tests.messages import check_message, raises_message

HEADER = json.dumps({"kind": "header", "format": FORMAT})
NOTE = json.dumps({"kind": "metric", "name": "loss"})
NEWER = json.dumps({"kind": "header", "format": FORMAT + 1})


def written(tmp_path: Path, *lines: str, end: str = "\n") -> TraceTail:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + end)
    return TraceTail(path)


def everything(tail: TraceTail) -> list[str]:
    found = []
    while records := tail.records():
        found += [record["kind"] for record in records]
    return found


def test_a_sound_trace_is_read_whole(tmp_path: Path) -> None:
    tail = written(tmp_path, HEADER, NOTE)

    assert everything(tail) == ["header", "metric"]
    assert tail.unread == ()


@pytest.mark.parametrize("cut", range(1, len(NOTE)))
def test_a_line_that_is_not_whole_waits_for_its_rest(tmp_path: Path, cut: int) -> None:
    tail = written(tmp_path, HEADER, NOTE[:cut], end="")

    assert everything(tail) == ["header"]
    (reported,) = tail.unread
    check_message(reported, "line 2", cut)
    with tail.path.open("a") as file:
        file.write(NOTE[cut:] + "\n")
    assert everything(tail) == ["metric"]
    assert tail.unread == ()


@pytest.mark.parametrize(
    ("lines", "kinds", "reported"),
    [
        ([], [], ()),
        ([NOTE, NOTE], [], ()),
        (["a photograph"], [], ("trace.jsonl",)),
        (["x", "y", "z"], [], ()),
        ([NOTE], [], ()),
        ([HEADER, "x", NOTE], ["header", "metric"], ("line 2",)),
        ([HEADER, "x", NOTE, "y", NOTE], ["header", "metric", "metric"], ("line 4",)),
        (["x", HEADER, NOTE], ["header", "metric"], ("line 1",)),
        ([HEADER, NOTE[:9], HEADER], ["header", "header"], ("line 2",)),
        (
            [HEADER, NOTE, NEWER, NOTE],
            ["header", "metric"],
            ("line 3", "'2'"),
        ),
        ([NEWER, NOTE, HEADER, NOTE], ["header", "metric"], ("line 1",)),
        (['{"kind": "header", "format": "<b>"}', NOTE], [], ("'<b>'",)),
        (['{"kind": "header", "format": -5}', NOTE], [], ("'-5'",)),
        (['{"kind": "header", "format": 0}', NOTE], [], ("'0'",)),
        (['{"kind": "header", "format": true}', NOTE], [], ("'True'",)),
        (['{"kind": "header"}', NOTE], [], ("'None'",)),
        ([HEADER, "[" * 100_000, NOTE], ["header", "metric"], ("line 2",)),
    ],
)
def test_unreadable_lines_are_skipped_and_reported(
    tmp_path: Path, lines: list[str], kinds: list[str], reported: tuple[str, ...]
) -> None:
    tail = written(tmp_path, *lines, end="\n" if lines else "")

    assert everything(tail) == kinds
    check_message(" | ".join(tail.unread), *reported)


def test_empty_lines_are_nothing_to_tell_of(tmp_path: Path) -> None:
    tail = written(tmp_path, HEADER, "", NOTE, " ", HEADER)

    assert everything(tail) == ["header", "metric", "header"]
    assert tail.unread == ()


def test_a_file_of_garbage_is_reported_in_few_lines(tmp_path: Path) -> None:
    tail = written(tmp_path, HEADER, *(["x", NOTE] * 100))

    assert len(everything(tail)) == 101
    assert len(tail.unread) == 21
    assert tail.unread[-1] == "and 80 more such places"


@pytest.mark.parametrize("more", [0, 5], ids=["shorter", "longer"])
def test_a_file_that_was_replaced_is_read_again(tmp_path: Path, more: int) -> None:
    tail = written(tmp_path, HEADER, NOTE, NOTE)
    everything(tail)
    other = tmp_path / "other"
    other.write_text("\n".join([HEADER, *[NOTE] * more]) + "\n")
    other.replace(tail.path)

    assert everything(tail) == ["header", *["metric"] * more]
    assert tail.restarts == 1


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_a_file_that_was_cut_is_read_again(tmp_path: Path, keep: float) -> None:
    tail = written(tmp_path, HEADER, *[NOTE] * 50)
    everything(tail)
    whole = tail.path.read_bytes()
    with tail.path.open("r+b") as file:
        file.truncate(int(len(whole) * keep))

    assert everything(tail)[0] == "header"
    assert tail.restarts == 1


@pytest.mark.parametrize("more", [0, 5, 50], ids=["shorter", "as long", "longer"])
def test_a_file_that_was_overwritten_in_place_is_read_again(tmp_path: Path, more: int) -> None:
    tail = written(tmp_path, HEADER, *[NOTE] * 5)
    everything(tail)
    other = "\n".join([HEADER, *[NOTE.replace("loss", "miss")] * more]) + "\n"
    who = tail.path.stat().st_ino
    tail.path.write_text(other)
    assert tail.path.stat().st_ino == who

    assert everything(tail) == ["header", *["metric"] * more]
    assert tail.restarts == 1


def test_a_file_that_only_grows_is_not_read_again(tmp_path: Path) -> None:
    tail = written(tmp_path, HEADER)
    found = everything(tail)
    with tail.path.open("a") as file:
        for _ in range(20):
            for part in (NOTE[:5], NOTE[5:] + "\n"):
                file.write(part)
                file.flush()
                found += everything(tail)

    assert found == ["header", *["metric"] * 20]
    assert tail.restarts == 0


LARGE = json.dumps({"kind": "note", "x": "z" * (1 << 25)})


def test_a_line_longer_than_one_read_hides_nothing_behind_it(tmp_path: Path) -> None:
    header = json.dumps({"kind": "header", "format": FORMAT, "world_size": 1000})
    tail = written(tmp_path, header, LARGE, NOTE)

    assert everything(tail) == ["header", "note", "metric"]


@pytest.mark.parametrize("world_size", [1, 2, None, "many", -5])
def test_a_line_longer_than_any_record_is_skipped(tmp_path: Path, world_size: Any) -> None:
    header = json.dumps({"kind": "header", "format": FORMAT, "world_size": world_size})
    tail = written(tmp_path, header, NOTE, LARGE, NOTE)

    assert everything(tail) == ["header", "metric", "metric"]
    check_message(tail.unread, "line 3", "33.6 MB")
    with raises_message(TraceError, "line 3"):
        list(read_records(tail.path))


def test_the_limit_of_a_record_leaves_room_for_every_exchange() -> None:
    """An exchange may hold 512 steps of each worker, each step at another share."""
    seen = Observation(9999, 123456, 12345678, (0.0123456789012345,), (0.0123456789012345,))
    one = len(dumps(encode_observation(seen)))
    for workers in (1, 2, 64, 10_000):
        assert longest_record(workers) > 512 * one * workers
    assert longest_record(None) == longest_record(1)
