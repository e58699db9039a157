"""Nothing that others wrote acts on the page."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.report.page.markup import Markup, data_island, element, escaped, number
from evenstride.report.wording import plain

HOSTILE = (
    "<script>alert(1)</script>",
    "</title></style></script><img src=x onerror=alert(1)>",
    "\" onmouseover=\"alert(1)' x='",
    "\x1b[31mred\x1b[0m\x07",
    "user\u202etxt.exe\u2066",
    "&lt;b&gt; &amp; &#60;",
    "<!-- --><![CDATA[",
    "javascript:alert(1)",
)


class Read(HTMLParser):
    """What a browser would make of it: elements with their attributes, and text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_text_wherever_it_stands(text: str) -> None:
    made = element("p", text, [text, element("b", text)], title=text)

    read = Read(made)
    assert [name for name, _ in read.elements] == ["p", "b"]
    shown = read.elements[0][1]["title"]
    assert read.text == 3 * str(shown)
    assert list(read.elements[0][1]) == ["title"]
    assert not any(ord(c) < 32 or c in "\u202e\u2066" for c in made)


@given(st.text())
def test_any_text_is_read_back_but_for_what_is_hidden(text: str) -> None:
    read = Read(element("p", text, title=text))

    assert [name for name, _ in read.elements] == ["p"]
    assert read.text == read.elements[0][1]["title"]


@pytest.mark.parametrize("text", HOSTILE)
def test_data_in_a_script_cannot_end_it_and_is_read_back(text: str) -> None:
    made = data_island("key", {text: [text, 1.5, None]})

    inside = made.removeprefix('<script type="application/json" id="key">')
    inside = inside.removesuffix("</script>")
    assert "<" not in inside
    assert json.loads(inside) == {plain(text): [plain(text), 1.5, None]}


def test_data_has_no_infinities() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        data_island("key", [float("inf")])


def test_a_long_text_is_cut() -> None:
    assert len(escaped("x" * 10_000)) == 400


def test_attributes_are_named_as_html_has_them() -> None:
    made = element("input", class_="a", aria_label="b", disabled=True, hidden=False, value=None)

    assert made == '<input class="a" aria-label="b" disabled>'
    assert isinstance(made, Markup)


def test_children_may_be_numbers_and_nothing() -> None:
    assert element("td", 12, 0.5, None) == "<td>120.5</td>"
    assert (number(1e-9), number(1234.567, 1)) == ("0", "1234.6")
