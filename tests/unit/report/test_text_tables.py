"""Tables of text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.report.wording import MOST_NAME, Table, shorten
from tests.messages import check_message

TABLE = Table(
    ("name", "one", "two\nlines", "x"),
    (("a", "1", "22", "333"), ("longer", "1.5", "", "4")),
)


def test_text_is_to_the_left_and_figures_are_to_the_right() -> None:
    check_message(TABLE.text(), "22", "333", "1.5")


def test_a_table_without_rows_has_its_headings() -> None:
    assert Table(("a", "b"), ()).text() == "a  b"


def test_a_wide_table_is_printed_in_parts_that_repeat_the_keys() -> None:
    check_message(TABLE.text(18), "22", "1.5", "333")
    assert TABLE.text(23) == TABLE.text()
    assert TABLE.text(22) != TABLE.text()


LONG = "eight-workers-of-four-kinds-with-noise"


def test_long_names_are_cut_in_the_middle_only_where_the_table_would_not_fit() -> None:
    table = Table(("name", "one"), ((LONG, "1"), ("b", LONG)))

    (part,) = table.parts(70)

    assert part.rows == (("eight-worker…-with-noise", "1"), ("b", LONG))
    assert len(part.rows[0][0]) == MOST_NAME
    assert table.text() == table.text(200)
    assert LONG in table.text().splitlines()[1]


def test_names_that_would_be_the_same_stay_as_they_are() -> None:
    names = ("eight-workers-of-four-kinds-with-noise", "eight-workers-of-five-kinds-with-noise")
    table = Table(("name", "one"), tuple((name, "1") for name in names))

    assert tuple(row[0] for part in table.parts(30) for row in part.rows) == names


@pytest.mark.parametrize("most", [5, 6, 24])
def test_a_short_name_has_its_beginning_its_end_and_no_more_than_it_may(most: int) -> None:
    short = shorten(LONG, most)

    assert len(short) == most
    before, after = short.split("…")
    assert LONG.startswith(before) and LONG.endswith(after) and after
    assert shorten(LONG[:most], most) == LONG[:most]


@given(
    st.lists(st.lists(st.text("abc", max_size=9), min_size=5, max_size=5), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 60),
)
def test_parts_have_every_column_once_and_are_no_wider_than_they_may(
    cells: list[list[str]], keys: int, width: int
) -> None:
    headings = tuple(f"heading {index}" for index in range(5))
    table = Table(headings, tuple(map(tuple, cells)), keys)

    parts = list(table.parts(width))

    assert all(part.headings[:keys] == headings[:keys] for part in parts)
    assert [name for part in parts for name in part.headings[keys:]] == list(headings[keys:])
    for part in parts:
        widest = max(map(len, part.lines()))
        assert widest <= width or len(part.headings) == keys + 1
    for part, following in pairwise(parts):
        more = sum(part.widths) + 2 * len(part.widths) + following.widths[keys]
        assert more > width
