"""The page as a whole: its content, and that it is self-contained."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import unescape
from pathlib import Path

import pytest
from benchmarks.report_runs import STARTED_UNIX_S, Made, make

from evenstride.core.diagnostics.alerts import Alert
from evenstride.report.analysis.run_timeline import RunTimeline
from evenstride.report.page.html_page import MARK, page_of, run_data
from evenstride.report.page.page_runs import read_run, run_of
from tests.messages import check_message, lines_with
from tests.unit.report.conftest import Making
from tests.unit.report.page.hostile import MARKER, TEXTS, hostile_trace
from tests.unit.report.page.test_templates import Read

CHANGE = (150, (1.0, 0.5, 0.15))
HANDLERS = re.compile(r"^on|^srcdoc$|^formaction$")


def _headings(page: str) -> list[str]:
    return re.findall(r"<h[23]>(.*?)</h[23]>", unescape(page))


def test_a_page_has_its_parts_in_the_order_of_what_a_reader_asks(made: Making) -> None:
    page = page_of([made(steps=300, changes=(CHANGE,), evaluated=50)])

    assert page.startswith("<!DOCTYPE html>\n<html lang=")
    assert MARK in page[:500]
    check_message(_headings(page))


def test_a_page_of_very_many_runs_names_those_without_room(tmp_path: Path) -> None:
    speeds = (1.0, 0.7, 0.5, 0.3, 1.0, 0.9, 0.8, 0.4)
    make(Made(500, speeds=speeds), tmp_path / "trace.jsonl")
    story = RunTimeline(tmp_path / "trace.jsonl")
    story.read()

    page = page_of([run_of(story, f"run {n}", 80) for n in range(80)])

    assert 4e6 < len(page.encode()) < 6e6
    assert [page.count(f'id="run{n}"') for n in range(81)] == [1] * 80 + [0]
    cut = "This page has too many runs for the charts and lists of this run"
    last = re.findall(rf'id="run(\d+)"><h2>[^<]*</h2>(?:(?!<section).)*?{cut}', page, re.DOTALL)[-1]
    assert last == "79"
    assert page.index(cut) > page.index("Where each worker", page.index('id="run40"'))


def test_several_runs_are_compared_before_each_is_described(made: Making) -> None:
    runs = [made(name, steps=120, policy=name) for name in ("uniform", "adaptive")]

    page = page_of(runs)
    check_message(_headings(page)[:4])
    output = re.search(
        r"adaptive trains (\d\.\d+) times as many samples per second as uniform", page
    )
    assert output
    rates = [run.totals.samples / run.totals.took_s for run in runs]
    assert float(output.group(1)) == pytest.approx(rates[1] / rates[0], abs=0.01)
    assert float(output.group(1)) > 1.3


def test_nothing_in_the_page_points_out_of_it(made: Making) -> None:
    read = Read(page_of([made(steps=60)]))

    for name, held in read.elements:
        assert name not in {"img", "iframe", "object", "embed", "form", "base", "audio", "video"}
        for key, value in held.items():
            if key in {"href", "src", "action", "data", "poster"}:
                assert str(value).startswith(("#", "data:,")), (name, key, value)


def test_the_policy_of_the_page_allows_its_own_script_and_nothing_else(made: Making) -> None:
    page = page_of([made(steps=60)])

    (policy,) = [
        held["content"]
        for name, held in Read(page).elements
        if name == "meta" and held.get("http-equiv") == "Content-Security-Policy"
    ]
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in str(policy).split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert not {"connect-src", "font-src", "frame-src"} & set(rules)


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    run = read_run(hostile_trace(tmp_path / "trace.jsonl"), TEXTS[0])
    benign = read_run(make(Made(60, evaluated=20), tmp_path / "other" / "trace.jsonl"), "other")

    page, read = page_of([run, run]), Read(page_of([run]))
    kinds = {name for name, _ in read.elements}
    assert kinds <= {name for name, _ in Read(page_of([benign])).elements} | {"li"}
    assert not [key for _, held in read.elements for key in held if HANDLERS.search(key)]
    assert not re.search(rf"<[^>]*window\.{MARKER}", re.sub(r'"[^"]*"', "", page))
    assert not any(c in page for c in "\x1b\x07\u202e\u2066")
    assert f"<script>window.{MARKER}=1</script>" in read.text
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    assert [one for one in scripts if not one.startswith(("{", "["))] == scripts[-1:]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: 2 * len(text) // 3],
        lambda text: text.replace('{"kind":"pass"', "garbage", 1),
        lambda text: text + '{"kind":"header","format":99}\n',
        lambda text: text.replace('"steps":', '"stops":'),
    ],
    ids=["torn", "garbage", "newer", "damaged"],
)
def test_unreadable_records_are_reported_and_the_rest_is_shown(made: Making, spoil: object) -> None:
    path = made(steps=60).story.path
    path.write_text(spoil(path.read_text()))  # type: ignore[operator]

    page = page_of([read_run(path, "spoilt")])
    notice = page.partition('class="notice"')[2].partition("</div>")[0]
    check_message(notice)
    assert "Where each worker" in page


def test_a_header_alone_has_a_page_with_its_facts(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"kind":"header","format":1,"policy":"adaptive","note":"só"}\n')

    page = page_of([read_run(path, "begun")])
    check_message(lines_with(page, "No step"))
    assert "só" in page


def test_runs_out_of_step_and_of_one_worker_have_pages(made: Making) -> None:
    apart = page_of([made("apart", steps=40, policy="uniform", header={"sync": "asp"})])
    alone = page_of([made("alone", steps=40, speeds=(1.0,))])

    assert "workers do not wait for each other" in apart
    assert "bar waiting" not in apart
    assert "nothing to balance" in alone


def test_a_continued_run_says_what_its_axis_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    make(Made(30), path)
    make(Made(40), path, started_unix_s=STARTED_UNIX_S + 7000.0)

    page = page_of([read_run(path, "twice")])
    check_message(lines_with(page, "Process 2"))


def test_alerts_are_reported_with_their_worker_and_step(made: Making) -> None:
    path = made(steps=60).story.path
    alert = Alert("slow", "node1/2", 40, 31, 16, 0.05, 0.1, speed=0.5)
    with path.open("a") as file:
        file.write(json.dumps({"kind": "alert", "at_s": 9.0, **alert.to_dict()}) + "\n")

    page = page_of([read_run(path, "warned")])
    assert f"<li>step 40: node1/2 {alert.reason}</li>" in page


def test_long_lists_are_cut_and_say_by_how_much(made: Making) -> None:
    run = made(steps=2500, policy="uniform")
    kept = [one for one in run.legs[0].generation.decisions if one.shares is None]
    assert len(kept) > 80, "a run with fewer decisions shows nothing here"

    page = page_of([run])
    assert f"{len(kept):,} decisions kept the split" in page
    check_message(lines_with(page, "--json has"), f"{len(kept) - 80:,}")
    assert len(run_data(run)["decisions"]) == len(run.legs[0].generation.decisions)


def test_many_workers_are_drawn_in_part_and_all_reported(made: Making) -> None:
    run = made(steps=40, speeds=tuple(1.0 - 0.01 * n for n in range(50)), batch=5000)

    page = page_of([run])
    assert "32 of 50 workers are drawn" in page
    assert all(f"<td>node{n // 2}/{n}</td>" in page for n in range(50))


def test_the_data_of_a_run_is_json_without_infinities(made: Making) -> None:
    path = made(steps=80, header={"odd": "?"}).story.path
    path.write_text(path.read_text().replace('"odd":"?"', '"odd":NaN'))
    run = read_run(path, "odd")
    output = json.loads(json.dumps(run_data(run), allow_nan=False))

    assert output["processes"][0]["header"]["odd"] is None
    assert output["totals"]["steps"] == 80
    assert output["generations"][0]["workers"] == list(run.lanes)
    assert len(output["decisions"]) == len(run.legs[0].generation.decisions)
