"""The picture of the README: which steps it shows and how it draws them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks import picture
from benchmarks.picture import Measured, last_steps

from evenstride.core.control.events import Exchanged, FleetFormed
from evenstride.core.fleet import Worker
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.trace.codec import TraceWriter
from tests.messages import check_message, raises_message

SVG = "{http://www.w3.org/2000/svg}"
STEPS = 20


def record(path: Path, shares: tuple[int, int], busy_s: tuple[float, float]) -> None:
    """Write the trace of a run in which every fifth step ends an epoch and is short."""
    step_s = max(busy_s)
    observations = [
        Observation(
            worker,
            shares[worker] if step % 5 != 4 else 1,
            step,
            (busy_s[worker],),
            # The first steps took longer and must not be shown.
            (step_s - busy_s[worker] + (5.0 if step < 10 else 0.0),),
        )
        for step in range(STEPS)
        for worker in (1, 0)
    ]
    with TraceWriter(path, {"policy": "uniform"}) as trace:
        trace.event(0.0, FleetFormed(0, 0, sum(shares), (Worker("a"), Worker("b"))), ())
        trace.event(1.0, Exchanged(STEPS, STEPS + 2, Measurements.of(observations)), ())


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    record(tmp_path / "uniform.jsonl", (10, 10), (0.1, 0.4))
    record(tmp_path / "adaptive.jsonl", (16, 4), (0.16, 0.15))
    return tmp_path


def test_the_last_steps_of_whole_batches_are_taken(demo: Path) -> None:
    found = last_steps(demo / "uniform.jsonl", 3)

    assert found.shares == [10, 10]
    assert found.steps == [[(0.1, pytest.approx(0.3)), (0.4, 0.0)]] * 3
    assert found.step_s == pytest.approx(0.4)


@pytest.mark.parametrize("count", [0, 17])
def test_more_steps_than_recorded_are_refused(demo: Path, count: int) -> None:
    with raises_message(SystemExit, "16 steps", count):
        last_steps(demo / "uniform.jsonl", count)


def test_blocks_are_in_proportion_to_times(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "picture.svg"
    monkeypatch.setattr(
        sys, "argv", ["picture.py", str(demo), str(out), "--names", "fast,slow", "--steps", "2"]
    )

    picture.main()

    drawn = ElementTree.parse(out).getroot()
    blocks = [rect for rect in drawn.iter(f"{SVG}rect") if rect.get("height") == str(picture.ROW)]
    rows: dict[str, list[tuple[str, float]]] = {}
    for rect in blocks:
        rows.setdefault(rect.attrib["y"], []).append(
            (rect.attrib["class"], float(rect.attrib["width"]))
        )
    fast, slow, *_ = rows.values()
    whole = picture.WIDTH - picture.LEFT - picture.EDGE
    assert [kind for kind, _ in fast] == ["busy", "wait"] * 2
    assert [width for _, width in fast] == pytest.approx([whole / 8, whole * 3 / 8 - 1] * 2, abs=1)
    assert {kind for kind, _ in slow} == {"busy"}
    assert len(rows) == 4


def test_the_text_of_the_picture_tells_shares_and_times(demo: Path) -> None:
    before, after = (last_steps(demo / f"{name}.jsonl", 4) for name in ("uniform", "adaptive"))

    drawn = picture.picture(before, after, ["fast", "slow"], 1.6)

    label = ElementTree.fromstring(drawn).get("aria-label") or ""
    check_message(label, "10 samples", "400 ms", "4 samples", "160 ms")
    check_message(drawn, "1.6 s")


def test_the_picture_in_the_readme_is_one_of_these() -> None:
    root = Path(__file__).parents[3]
    shown = (root / "docs" / "images" / "before-after.svg").read_text()

    assert picture.STYLE in shown
    assert len(re.findall('class="busy"', shown)) > 30
    assert ElementTree.fromstring(shown).get("role") == "img"


def test_colours_differ_in_light_and_dark() -> None:
    assert {"#0072B2", "#E69F00", "#56B4E9"} <= set(re.findall(r"#[0-9A-F]{6}", picture.STYLE))
    assert "prefers-color-scheme: dark" in picture.STYLE
    assert Measured([[(1.0, 0.5)]], [1]).step_s == 1.5
