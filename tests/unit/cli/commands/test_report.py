"""``evenstride report`` as its users have it."""

from __future__ import annotations

import re
import shutil
from html import unescape
from pathlib import Path

import pytest
from benchmarks.report_runs import Made, make

from tests.messages import check_message
from tests.unit.cli.conftest import Shell


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder."""
    return make(Made(60), tmp_path / "runs" / "today" / "trace.jsonl").parent


def test_the_page_is_written_next_to_the_trace_and_its_path_printed(
    shell: Shell, run: Path
) -> None:
    answer = shell("report", str(run))

    *findings, last = answer.out.splitlines()
    assert (answer.code, last, answer.err) == (0, f"report {run / 'report.html'}", "")
    assert len(findings) == 3 and findings[0].startswith("Balanced steps take ")
    page = (run / "report.html").read_text()
    assert all(unescape(page).count(sentence) == 1 for sentence in findings)
    assert "<h1>today</h1>" in (run / "report.html").read_text()
    assert shell("report", str(run / "trace.jsonl")).code == 0, "a report is overwritten"


def test_json_has_the_figures_and_the_page_is_written_too(shell: Shell, run: Path) -> None:
    output = shell("report", str(run), "-o", "page.html", "--json").json()

    assert output["page"] == "page.html" and Path("page.html").is_file()
    (only,) = output["runs"]
    assert (only["name"], only["totals"]["steps"]) == ("today", 60)


def test_a_page_of_several_long_runs_is_below_six_megabytes(shell: Shell, tmp_path: Path) -> None:
    speeds = (1.0, 0.7, 0.5, 0.3, 1.0, 0.9, 0.8, 0.4)
    path = make(Made(3000, speeds=speeds), tmp_path / "a" / "trace.jsonl")
    others = [tmp_path / name / "trace.jsonl" for name in "bc"]
    for other in others:
        other.parent.mkdir()
        shutil.copy(path, other)

    assert shell("report", *map(str, (path, *others)), "-o", "page.html").code == 0
    page = Path("page.html").read_text()
    assert 1e6 < len(page.encode()) < 6e6
    assert "There is no room" not in page, "all three are drawn, with fewer bars each"


def test_more_runs_than_a_page_has_room_for_are_refused(shell: Shell, run: Path) -> None:
    others = [run.parent / f"{n}" / "trace.jsonl" for n in range(200)]
    for other in others:
        other.parent.mkdir()
        other.write_text("{}")

    refusal = shell("report", str(run), *map(str, others)).refusal()
    check_message(refusal, "201", "200")
    assert not (run / "report.html").exists()
    answer = shell("report", str(run), *map(str, others[1:]))
    assert answer.code == 0 and (run / "report.html").is_file()


def test_figures_are_reported_of(shell: Shell, run: Path) -> None:
    pytest.importorskip("matplotlib")

    answer = shell("report", str(run), "--figures", "figures")
    drawn = re.findall(r"^figure (.*)$", answer.out, re.MULTILINE)
    assert drawn and all(Path(path).is_file() for path in drawn)


def test_a_folder_for_figures_that_cannot_be_is_refused_before_a_page_is_written(
    shell: Shell, run: Path
) -> None:
    pytest.importorskip("matplotlib")
    Path("taken").write_text("a letter")

    for folder in ("taken", "taken/figures"):
        refusal = shell("report", str(run), "--figures", folder).refusal()
        check_message(refusal, folder)
        assert not (run / "report.html").exists()


def test_runs_of_the_same_name_are_distinguished(shell: Shell, run: Path, tmp_path: Path) -> None:
    other = make(Made(60), tmp_path / "older" / "today" / "trace.jsonl").parent
    loose = make(Made(60), tmp_path / "loose.jsonl")

    output = shell("report", str(run), str(other), str(loose), "--json").json()
    names = [one["name"] for one in output["runs"]]
    assert names[:2] == ["runs/today", "older/today"]
    assert names[2].endswith("loose")
    beside = make(Made(60), tmp_path / "loose.json")
    output = shell("report", str(loose), str(beside), "--json").json()
    first, second = (one["name"] for one in output["runs"])
    assert second == f"{first} (2)"


def test_a_run_that_is_given_twice_is_shown_once(shell: Shell, run: Path) -> None:
    answer = shell("report", str(run), str(run / "trace.jsonl"), "--json")

    assert [one["name"] for one in answer.json()["runs"]] == ["today"]
    check_message(answer.err, run / "trace.jsonl")
    assert "Side by side" not in (run / "report.html").read_text()


def test_an_unrelated_file_is_not_overwritten(shell: Shell, run: Path) -> None:
    Path("mine.html").write_text("mine")

    answer = shell("report", str(run), "-o", "mine.html")
    check_message(answer.refusal(), "mine.html")
    assert Path("mine.html").read_text() == "mine"
    assert shell("report", str(run), "-o", "mine.html", "--force").code == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "PK\x03\x04 something else\nand more\n",
        '{"kind":"header","format":99}\n',
        '{"kind":"header","format":-5}\n',
        '{"kind":"header","format":1,"policy":"uniform"}\n',
    ],
    ids=["empty", "foreign", "newer", "spoilt", "header alone"],
)
def test_a_trace_without_content_gives_one_line_and_no_page(shell: Shell, text: str) -> None:
    Path("trace.jsonl").write_text(text)

    check_message(shell("report", ".").refusal(), "trace.jsonl")
    assert not Path("report.html").exists()


def test_unreadable_records_are_reported_with_the_page(shell: Shell, run: Path) -> None:
    trace = run / "trace.jsonl"
    trace.write_bytes(trace.read_bytes()[:-20])

    answer = shell("report", str(run))
    assert answer.code == 0
    assert answer.err.startswith("today: line ") and "is incomplete" in answer.err


def test_no_trace_no_report(shell: Shell, tmp_path: Path) -> None:
    assert "no trace at nowhere" in shell("report", "nowhere").refusal()
    (tmp_path / "empty").mkdir()
    check_message(shell("report", "empty").refusal(), "empty", "trace.jsonl")


def test_the_runs_of_a_demo_are_compared_on_a_page_in_its_folder(
    shell: Shell, tmp_path: Path
) -> None:
    for policy in ("uniform", "adaptive"):
        make(Made(60, policy=policy), tmp_path / "demo" / f"{policy}.jsonl")
    (tmp_path / "demo" / "news.jsonl").write_text('{"what":"limits"}\n')

    answer = shell("report", "demo")
    assert answer.out.splitlines()[0].startswith("adaptive trains ")
    assert answer.out.splitlines()[-1] == "report demo/report.html"
    assert "Side by side" in Path("demo/report.html").read_text()


def test_runs_below_a_folder_share_its_page(shell: Shell, tmp_path: Path) -> None:
    for name in ("a", "b"):
        make(Made(60), tmp_path / "runs" / name / "trace.jsonl")

    output = shell("report", "runs", "--json").json()
    assert (output["page"], [one["name"] for one in output["runs"]]) == (
        "runs/report.html",
        ["a", "b"],
    )
