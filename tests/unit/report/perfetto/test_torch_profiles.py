"""Exports of torch.profiler with the run: on one clock, nothing mixed up."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from evenstride.errors import ConfigError
from evenstride.report.perfetto.chrome_trace import export
from evenstride.report.perfetto.run_events import BASE_S
from tests.messages import check_message, raises_message
from tests.unit.report.perfetto.events import Events, read_events
from tests.unit.report.virtual import VirtualRun

STARTED_S = int(1.7e9)
BASE_NS = STARTED_S // BASE_S * BASE_S * 1_000_000_000
AT_US = (STARTED_S + 1) * 1_000_000 - BASE_NS // 1000  # a second into the run


@pytest.fixture
def run(tmp_path: Path) -> VirtualRun:
    run = VirtualRun(tmp_path / "trace.jsonl", lambda _: (1.0, 0.5, 1.0))
    run.begin()
    run.run(40)
    return run


def profile(rank: int | None, *more: dict[str, Any], base_ns: int = BASE_NS) -> dict[str, Any]:
    """Return an export as torch.profiler makes it; all ranks have the same numbers."""
    shift_us = (BASE_NS - base_ns) // 1000
    at_us = AT_US + shift_us
    common = {"pid": 77, "tid": 77}
    name = {"ph": "M", "ts": at_us, "pid": 77, "tid": 0}
    events = [
        {**name, "name": "process_name", "args": {"name": "python"}},
        {**name, "name": "process_labels", "args": {"labels": "CPU"}},
        {**name, "name": "process_sort_index", "args": {"sort_index": 77}},
        {**name, "name": "thread_name", "tid": 77, "args": {"name": "thread 77 (python)"}},
        {**common, "ph": "X", "name": "forward", "ts": at_us, "dur": 50.5},
        {**common, "ph": "X", "name": "aten::mm", "ts": at_us + 10, "dur": 5.25},
        {**common, "ph": "s", "name": "ac2g", "cat": "ac2g", "id": 5, "ts": at_us + 11},
        {"ph": "f", "name": "ac2g", "cat": "ac2g", "id": 5, "ts": at_us + 20, "bp": "e"}
        | {"pid": 0, "tid": 7},
        {"ph": "X", "name": "kernel", "ts": at_us + 20, "dur": 3, "pid": 0, "tid": 7},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": at_us + 60},
        *more,
    ]
    text: dict[str, Any] = {"baseTimeNanoseconds": base_ns, "traceEvents": events}
    if rank is not None:
        text["distributedInfo"] = {"backend": "gloo", "rank": rank, "world_size": 3}
    return text


def merged(run: VirtualRun, *given: str) -> Events:
    path = run.writer.path.with_name("out.json")
    export(run.writer.path, path, given)
    return read_events(path)


def written(tmp_path: Path, name: str, text: Any) -> str:
    (tmp_path / name).write_text(json.dumps(text))
    return str(tmp_path / name)


def test_ranks_with_the_same_numbers_are_distinguished(run: VirtualRun, tmp_path: Path) -> None:
    files = [written(tmp_path, f"{name}.json", profile(rank)) for rank, name in enumerate("abc")]
    alone, events = merged(run), merged(run, *reversed(files))

    python = [f"worker {rank}: torch.profiler python 77 CPU" for rank in range(3)]
    shown = list(events.groups)
    for rank, name in enumerate(python):
        (forward, mm) = events.slices(name, "thread 77 (python)")
        assert (forward["name"], forward["ts"], forward["dur"]) == ("forward", AT_US, 50.5)
        assert (mm["name"], mm["ts"]) == ("aten::mm", AT_US + 10)
        own = shown.index(f"worker {rank} (host/{rank})")
        assert (
            own
            < shown.index(name)
            < (shown.index(f"worker {rank + 1} (host/{rank + 1})") if rank < 2 else len(shown))
        )
    starts = {e["id"]: e["pid"] for e in events.all if e["ph"] == "s"}
    ends = [e["id"] for e in events.all if e["ph"] == "f"]
    assert len(starts) == 3
    assert sorted(starts) == sorted(ends)
    assert [e for e in events.all if e in alone.all] == list(alone.all)


def test_the_clock_of_an_export_with_another_base_is_moved(run: VirtualRun, tmp_path: Path) -> None:
    same = written(tmp_path, "a.json", profile(0))
    old = written(tmp_path, "b.json", profile(1, base_ns=0))  # as before torch 2.4
    events = merged(run, same, old)

    moments = [e["ts"] for e in events.all if e["name"] == "forward"]
    assert moments == [AT_US, pytest.approx(AT_US, abs=0.5)]


@pytest.mark.parametrize(
    "name", ["trace.rank2.json", "RANK_2_of_8.json", "run-rank-002.pt.trace.json", "rank2"]
)
def test_the_rank_may_be_in_the_name(run: VirtualRun, tmp_path: Path, name: str) -> None:
    events = merged(run, written(tmp_path, name, profile(None)))

    assert "worker 2: torch.profiler python 77 CPU" in events.groups


def test_the_rank_may_be_given(run: VirtualRun, tmp_path: Path) -> None:
    path = written(tmp_path, "some.json", profile(None))

    assert "worker 1: torch.profiler python 77 CPU" in merged(run, f"1={path}").groups


def test_compressed_exports_and_bare_lists_are_read(run: VirtualRun, tmp_path: Path) -> None:
    packed = tmp_path / "a.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(profile(0)).encode()))
    bare = written(tmp_path, "rank1.json", profile(1, base_ns=0)["traceEvents"])

    names = [name for name in merged(run, str(packed), bare).groups if "python" in name]
    assert len(names) == 2


def test_an_export_without_a_rank_is_refused(run: VirtualRun, tmp_path: Path) -> None:
    path = written(tmp_path, "vm_123.pt.trace.json", profile(None))

    with raises_message(ConfigError, "--with", "RANK", "FILE"):
        merged(run, path)
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"traceEvents": [', ("JSON",)),
        (b"\x1f\x8b nothing of the kind", ()),
        (b"[" * 100_000, ("JSON",)),
        (b'{"events": []}', ()),
        (b"7", ()),
        (b'"\xff"', ("JSON",)),
    ],
)
def test_an_invalid_export_is_refused(
    run: VirtualRun, tmp_path: Path, content: bytes, said: tuple[str, ...]
) -> None:
    (tmp_path / "rank0.json").write_bytes(content)

    with raises_message(ConfigError, *said):
        merged(run, str(tmp_path / "rank0.json"))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["rank0.json", "trace.jsonl"]


def test_a_missing_export_is_reported(run: VirtualRun, tmp_path: Path) -> None:
    with raises_message(ConfigError, "rank9.json"):
        merged(run, str(tmp_path / "rank9.json"))


def test_hostile_names_in_an_export_are_only_text(run: VirtualRun, tmp_path: Path) -> None:
    bad = 'a"</script>\x1b[31m\u202e'
    name = {"ph": "M", "name": "process_name", "pid": 9, "tid": 0, "args": {"name": bad}}
    thread = {"ph": "M", "name": "thread_name", "pid": 9, "tid": 9, "args": {"name": bad}}
    events = merged(run, written(tmp_path, "a.json", profile(0, name, thread)))

    neutral = 'a"</script>�[31m�'
    assert f"worker 0: torch.profiler {neutral} 9" in events.groups
    assert neutral in {track for _, track in events.tracks}


def test_numbers_that_json_does_not_know_are_left_out(run: VirtualRun, tmp_path: Path) -> None:
    odd = {"ph": "X", "name": "odd", "ts": AT_US, "dur": 1, "pid": 3, "tid": 4}
    text = profile(0, {**odd, "args": {"rate": float("nan"), "most": float("inf"), "n": 3}})
    events = merged(run, written(tmp_path, "a.json", text))

    (event,) = [e for e in events.all if e["name"] == "odd"]
    assert event["args"] == {"rate": None, "most": None, "n": 3}


@pytest.mark.parametrize(("moved_s", "where"), [(3600, "after its last"), (-7200, "before its f")])
def test_an_export_of_another_time_is_reported(
    run: VirtualRun, tmp_path: Path, moved_s: int, where: str
) -> None:
    text = profile(0, base_ns=BASE_NS)
    text["baseTimeNanoseconds"] += moved_s * 1_000_000_000
    path = written(tmp_path, "a.json", text)
    made = export(run.writer.path, tmp_path / "out.json", [path])

    (remark,) = made.remarks
    check_message(remark)
    assert where in remark


def test_an_export_is_not_written_over(run: VirtualRun, tmp_path: Path) -> None:
    path = written(tmp_path, "some.json", profile(None))

    with raises_message(ConfigError):
        export(run.writer.path, Path(path), [f"1={path}"])
    assert json.loads(Path(path).read_text()) == profile(None)
