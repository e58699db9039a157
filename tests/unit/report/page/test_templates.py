"""Nothing that others wrote acts on the page."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError

from evenstride.report.page.findings import PageTable
from evenstride.report.page.html_page import environment
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


def made_of(template: str, **values: object) -> str:
    return environment().from_string(template).render(values)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_text_wherever_it_stands(text: str) -> None:
    made = made_of('<p title="{{ text }}">{{ text }}<b>{{ text }}</b></p>', text=text)

    read = Read(made)
    assert [name for name, _ in read.elements] == ["p", "b"]
    shown = read.elements[0][1]["title"]
    assert read.text == 2 * str(shown)
    assert list(read.elements[0][1]) == ["title"]
    assert not any(ord(c) < 32 or c in "\u202e\u2066" for c in made)


@given(st.text())
def test_any_text_is_read_back_except_for_hidden_characters(text: str) -> None:
    read = Read(made_of('<p title="{{ text }}">{{ text }}</p>', text=text))

    assert [name for name, _ in read.elements] == ["p"]
    assert read.text == read.elements[0][1]["title"] == plain(text)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_table_shows_hostile_text_as_text(text: str) -> None:
    table = PageTable((text, "n"), [(text, text), (text,)], caption=text)
    template = "{% from 'macros.html' import table %}{{ table(one) }}"
    read = Read(made_of(template, one=table))

    names = {name for name, _ in read.elements}
    assert names == {"p", "div", "table", "thead", "tr", "th", "tbody", "td"}
    assert not any(key.startswith("on") for _, held in read.elements for key in held)


@pytest.mark.parametrize("text", HOSTILE)
def test_data_in_a_script_cannot_end_it_and_is_read_back(text: str) -> None:
    template = "{% from 'macros.html' import data %}{{ data('key', values) }}"
    made = made_of(template, values={text: [text, 1.5, None]}).strip()

    inside = made.removeprefix('<script type="application/json" id="key">')
    inside = inside.removesuffix("</script>")
    assert "<" not in inside
    assert inside.isprintable()
    assert json.loads(inside) == {text: [text, 1.5, None]}


def test_data_has_no_infinities() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        made_of("{{ values|tojson }}", values=[float("inf")])


def test_a_long_text_is_cut() -> None:
    assert len(made_of("{{ text }}", text="x" * 10_000)) == 400


def test_numbers_are_short_and_nothing_is_nothing() -> None:
    assert made_of("{{ 12 }} {{ half }} {{ nothing }}.", half=0.5, nothing=None) == "12 0.5 ."


def test_a_name_that_was_not_given_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="missing"):
        made_of("{{ missing }}")
