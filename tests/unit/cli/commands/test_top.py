"""`evenstride top`: what it prints, wide and narrow, in colour and without."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from evenstride.cli.commands.top import dashboard
from evenstride.cli.main import app
from evenstride.report.analysis.live_view import View, view_of
from evenstride.report.analysis.run_timeline import RunTimeline
from tests.messages import check_message
from tests.unit.report.virtual import VirtualRun


@pytest.fixture
def run(tmp_path: Path) -> VirtualRun:
    run = VirtualRun(
        tmp_path / "trace.jsonl",
        lambda step: (1.0, 1.0, 0.5 if step >= 40 else 1.0),
        policy="uniform",
        noise=0.01,
    )
    run.begin()
    run.run(120)
    return run


def printed(path: Path, *arguments: str, columns: int = 80) -> str:
    result = CliRunner().invoke(
        app, ["top", str(path), *arguments], env={"COLUMNS": str(columns), "NO_COLOR": "1"}
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def viewed(run: VirtualRun) -> View:
    story = RunTimeline(run.writer.path)
    story.read()
    view = view_of(story, 1.7e9 + 50.0)
    assert view is not None
    return view


def drawn(view: View, *, width: int, height: int, live: bool, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(file=file, width=width, height=height, highlight=False)
    console.print(dashboard(view, console, live=live))
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("columns", [40, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(run: VirtualRun, columns: int) -> None:
    lines = printed(run.writer.path, "--once", columns=columns).splitlines()

    assert max(map(len, lines)) <= columns
    assert any("own speed" in line for line in lines)
    assert any(line.split()[:1] == ["2"] and "0.5" in line for line in lines)


def test_columns_are_left_out_before_any_is_cut(run: VirtualRun) -> None:
    """Every worker's line is whole at any width, and the more columns, the wider the terminal."""
    printed, view = [], viewed(run)
    for width in range(40, 131):
        lines = [
            line.split() for line in drawn(view, width=width, height=40, live=False).split("\n")
        ]
        heading = next(line for line in lines if line[:1] == ["rank"])
        slow = next(line for line in lines if line[:1] == ["2"])
        assert "0.50 since 40" in " ".join(slow), width
        assert "own speed" in " ".join(heading), width
        assert not any("…" in cell for cell in (*heading, *slow)), width
        printed.append(len(heading))

    assert printed == sorted(printed)
    assert len(set(printed)) == 4


def test_it_names_the_slow_worker_since_when_and_the_cost(run: VirtualRun) -> None:
    text = " ".join(printed(run.writer.path, "--all", columns=200).split())

    assert "0.50 since 40" in text
    check_message(text, "worker 2", "step 40", "0.50", "1.00", varies=[r"[\d,]+ days(?= ago)"])


def test_it_begins_with_the_key_findings_and_has_the_rest_on_request(run: VirtualRun) -> None:
    lines = printed(run.writer.path, columns=200).splitlines()

    assert lines[3].startswith("Equal steps take ")
    assert lines[4].startswith("Worker 2 is the slowest: its steps take 2.0 times as long as")
    assert lines[5].startswith(("Worker ", "The workers waited"))
    assert lines[6].startswith("rank"), "three sentences, then the table"
    assert "last decision" not in "\n".join(lines) and "--all" in lines[-1]
    assert "last decision" in printed(run.writer.path, "--all")


@pytest.fixture
def demo(run: VirtualRun, tmp_path: Path) -> Path:
    """A folder as `evenstride demo` leaves it: two traces, and other files."""
    folder = tmp_path / "demo"
    folder.mkdir()
    run.writer.path.rename(folder / "uniform.jsonl")
    balanced = VirtualRun(folder / "adaptive.jsonl", lambda _: (1.0, 1.0, 0.5), noise=0.01)
    balanced.begin()
    balanced.run(60)
    (folder / "news.jsonl").write_text('{"what": "limits"}\n')
    return folder


def test_several_runs_are_side_by_side(demo: Path) -> None:
    lines = printed(demo, columns=120).splitlines()

    assert lines[0].startswith("adaptive trains 1.")
    assert [line.split()[:2] for line in lines if line.startswith(("adaptive ", "uniform "))][
        1:
    ] == [["adaptive", "adaptive"], ["uniform", "uniform"]]
    assert "host/0" not in "\n".join(lines)
    assert len(re.findall(r"^ +0  host/0 ", printed(demo, "--all", columns=120), re.MULTILINE)) == 2
    shown = json.loads(printed(demo, "--json"))
    assert [one["policy"] for one in shown["runs"]] == ["adaptive", "uniform"]


def test_a_folder_with_one_run_below_it_shows_that_run(run: VirtualRun, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "today"
    folder.mkdir(parents=True)
    run.writer.path.rename(folder / "trace.jsonl")

    assert str(folder / "trace.jsonl") in printed(folder.parent, columns=200)
    assert json.loads(printed(folder.parent, "--json"))["policy"] == "uniform"


def test_a_wide_terminal_has_names_and_memory(run: VirtualRun) -> None:
    wide, narrow = (drawn(viewed(run), width=w, height=40, live=False) for w in (160, 80))

    assert "host/1" in wide.split("last decision")[0]
    assert "1.0 of 4.0 GiB" in wide
    assert "GiB" not in narrow


@pytest.fixture
def many(tmp_path: Path) -> VirtualRun:
    """A run of 40 workers, of which the last is slow."""
    run = VirtualRun(
        tmp_path / "t.jsonl",
        lambda _: (*(1.0,) * 39, 0.5),
        workers=40,
        batch=400,
        policy="uniform",
    )
    run.begin()
    run.run(40)
    return run


@pytest.mark.parametrize(("width", "height"), [(120, 24), (100, 30), (60, 24), (44, 30)])
def test_a_live_view_fits_the_height(many: VirtualRun, width: int, height: int) -> None:
    lines = drawn(viewed(many), width=width, height=height, live=True).splitlines()

    assert height - 3 <= len(lines) <= height - 1, "the last line is the cursor's"
    assert any(line.lstrip().startswith("39 ") for line in lines)
    assert any("more workers" in line for line in lines)
    assert any("Ctrl-C leaves" in line for line in lines)


def test_output_that_is_printed_once_has_all_workers(many: VirtualRun) -> None:
    assert drawn(viewed(many), width=120, height=24, live=False).count("host/") >= 40


def test_without_unicode_bars_are_plain(run: VirtualRun) -> None:
    text = drawn(viewed(run), width=100, height=40, live=False, encoding="ascii")

    assert "###" in text


def test_json_has_all_of_it(run: VirtualRun) -> None:
    shown = json.loads(printed(run.writer.path, "--json"))

    assert shown["workers"][2]["since"] == 40
    assert shown["totals"]["speedup_model"] == pytest.approx(1.0)
    assert shown["ended"] is False
    assert shown["unread"] == []


def test_a_run_that_ended_badly_is_shown_with_what_could_not_be_read(run: VirtualRun) -> None:
    with run.writer.path.open("ab") as file:
        file.write(b'{"kind": "event", "at_s"')

    text = " ".join(printed(run.writer.path, "--once").split())
    assert "not read: line" in text
    assert "is incomplete: 24 bytes" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ()),
        ("GIF89a\n", ()),
        ('{"kind": "header", "format": 99}\n', ("'99'",)),
        ('{"kind": "header", "format": 1, "policy": "uniform"}\n', ()),
    ],
)
@pytest.mark.parametrize("option", ["--once", "--json"])
def test_a_file_that_tells_of_no_run_is_refused(
    tmp_path: Path, content: str, message: tuple[str, ...], option: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    result = CliRunner().invoke(app, ["top", str(path), option])

    assert result.exit_code == 1
    check_message(str(result.exception), *message)
    assert "contains no run" in str(result.exception)
