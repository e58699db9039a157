"""The runs at a path, whatever kind of folder it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstride.errors import TraceError
from evenstride.report.analysis.run_folder import is_trace, one_trace_at, run_names, traces_at
from tests.messages import check_message, raises_message

HEADER = '{"kind":"header","format":1}\n'


def wrote(path: Path, text: str = HEADER) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_and_a_runs_folder_are_one_run(tmp_path: Path) -> None:
    trace = wrote(tmp_path / "today" / "trace.jsonl")
    wrote(tmp_path / "today" / "phase" / "trace.jsonl")

    assert traces_at(trace) == traces_at(trace.parent) == [trace]
    assert one_trace_at(trace.parent) == trace


def test_the_folder_of_a_demo_holds_its_two_runs(tmp_path: Path) -> None:
    traces = [wrote(tmp_path / f"{name}.jsonl") for name in ("adaptive", "uniform")]
    wrote(tmp_path / "news.jsonl", '{"what":"limits"}\n')
    wrote(tmp_path / "report.json", "{}")

    assert traces_at(tmp_path) == traces
    with raises_message(TraceError, "2 runs", traces[0], traces[1]):
        one_trace_at(tmp_path)


def test_runs_below_a_folder_are_found_and_calibrations_left_out(tmp_path: Path) -> None:
    lab = [wrote(tmp_path / "lab" / name / "trace.jsonl") for name in ("adaptive-1", "uniform-1")]
    wrote(tmp_path / "lab" / "calibration-before" / "worker-0.jsonl")
    other = wrote(tmp_path / "today" / "trace.jsonl")
    wrote(tmp_path / "a" / "b" / "c" / "trace.jsonl")

    assert traces_at(tmp_path / "lab") == lab
    assert traces_at(tmp_path) == [*lab, other], "two levels below, no more"


def test_a_folder_without_a_run_lists_what_it_contains(tmp_path: Path) -> None:
    with raises_message(TraceError, "empty", "trace.jsonl"):
        traces_at(tmp_path)
    for number in range(9):
        wrote(tmp_path / f"note-{number}.txt", "x")
    (tmp_path / "data").mkdir()
    with raises_message(TraceError, "data/", "note-0.txt", "4 more"):
        traces_at(tmp_path)


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no trace at .*nowhere"):
        traces_at(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "trace"),
    [(HEADER, True), ('{ "kind" : "header"}', True), ('{"what":1}', False), ("", False)],
)
def test_a_trace_is_recognised_by_its_header(tmp_path: Path, text: str, trace: bool) -> None:
    assert is_trace(wrote(tmp_path / "x.jsonl", text)) is trace
    assert not is_trace(tmp_path)


def test_names_of_runs_are_the_shortest_that_differ(tmp_path: Path) -> None:
    traces = [tmp_path / one for one in ("a/x/trace.jsonl", "b/x/trace.jsonl", "c/y.jsonl")]

    assert run_names(traces) == ["a/x", "b/x", "c/y"]
    assert run_names(traces[:1]) == ["x"]
    check_message(run_names([traces[0], traces[0]]))
