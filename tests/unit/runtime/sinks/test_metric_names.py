"""The table of names equals that of the page on metrics; texts are neutralised."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.runtime.sinks.snapshot import METRICS, PREFIX, neutral
from tests.house.sources import ROOT
from tests.messages import check_message
from tests.unit.runtime.sinks.made import HOSTILE

PAGE = ROOT / "docs" / "reference" / "metrics.md"


def test_the_page_has_the_table_of_the_code() -> None:
    rows = [
        f"| `{PREFIX}{m.name}` | {'counter' if m.counts else 'gauge'} | "
        f"{f'`{m.label}`' if m.label else ''} | {m.unit} | {m.means} |"
        for m in METRICS
    ]

    assert "\n".join(rows) in PAGE.read_text()
    found = re.findall(rf"^\| `{PREFIX}\w+` \|", PAGE.read_text(), re.MULTILINE)
    assert len(found) == len(METRICS), "and no other rows"


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_name_follows_the_conventions_of_prometheus(metric: object) -> None:
    name, unit = metric.name, metric.unit  # type: ignore[attr-defined]

    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
    for symbol, word in (("s", "seconds"), ("1", "ratio")):
        assert (unit == symbol) == name.endswith(f"_{word}"), "a unit is written out in the name"


@given(st.text(max_size=40))
def test_only_printable_characters_remain(text: str) -> None:
    assert neutral(text).isprintable()
    if text.isprintable() and "\\" not in text:
        assert neutral(text) == text


@given(st.text(max_size=6), st.text(max_size=6))
def test_different_texts_stay_different(one: str, other: str) -> None:
    assert (neutral(one) == neutral(other)) == (one == other)


def test_a_hostile_name_has_no_effect() -> None:
    check_message(neutral(HOSTILE))
    assert neutral("\ud800\u2028") == "\\ud800\\u2028"
