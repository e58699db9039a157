"""HTML as values: what is no `Markup` is escaped, by one function, wherever it is put.

Names of hosts, files and metrics, reasons and facts are others' texts. They come into a page as
``str`` only, and `element` and `data_island` are the only ways in.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

from evenstride.report.wording import plain

_VOID = {"meta", "link", "br", "hr", "input", "col"}
_IN_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028"}


class Markup(str):
    """Text that is HTML already, made here or read from the files of this package."""

    __slots__ = ()


Child = str | int | float | None | Iterable["Child"]
Attribute = str | int | float | bool | None


def escaped(value: object, most: int = 400) -> Markup:
    """Return any text as HTML that shows it: nothing in it acts on the page.

    Args:
        value: anything; control and bidi characters become a replacement character.
        most: characters; longer texts are cut.

    >>> escaped('<b onclick="x()">')
    '&lt;b onclick=&quot;x()&quot;&gt;'
    """
    return Markup(html.escape(plain(value, most), quote=True))


def element(name: str, *children: Child, **attributes: Attribute) -> Markup:
    """Return an element with its children; texts are escaped, `Markup` stands as it is.

    Args:
        name: of the element.
        children: texts, elements, or lists of them; ``None`` is nothing.
        attributes: ``class_`` is ``class``, ``aria_label`` is ``aria-label``; ``None`` and false
            are left out, and true has no value.

    >>> element("p", "a < b", element("b", "!"), class_="note")
    '<p class="note">a &lt; b<b>!</b></p>'
    """
    told = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{told}>")
    return Markup(f"<{name}{told}>{together(*children)}</{name}>")


def together(*children: Child) -> Markup:
    """Return texts and elements one behind the other."""
    return Markup("".join(map(_child, children)))


def _child(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str | int | float):
        return escaped(number(child) if isinstance(child, float) else child)
    return "".join(map(_child, child))


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    if isinstance(value, Markup):
        return f' {name}="{value}"'
    told = number(value) if isinstance(value, float) else value
    return f' {name}="{escaped(told, most=4000)}"'


def number(value: float, places: int = 2) -> str:
    """Return a number for an attribute, as short as it can be.

    >>> number(12.50), number(3.0), number(-0.001)
    ('12.5', '3', '0')
    """
    told = f"{value:.{places}f}"
    told = told.rstrip("0").rstrip(".") if "." in told else told
    return "0" if told == "-0" else told


def data_island(key: str, value: Any) -> Markup:
    """Return a script element that holds data and cannot end early.

    Args:
        key: its id.
        value: JSON types without infinities; texts in it are made `plain`.
    """
    told = json.dumps(_plain(value), separators=(",", ":"), allow_nan=False)
    for mark, code in _IN_SCRIPT.items():
        told = told.replace(mark, code)
    return Markup(f'<script type="application/json" id="{escaped(key)}">{told}</script>')


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
