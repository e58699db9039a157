"""What charts are drawn of, as SVG that is stretched in width alone.

A drawing is ``WIDTH`` units wide whatever the screen, so nothing in it may hang on its width:
lines keep theirs, dots are lines of no length with round ends, hatching is horizontal, and text
stands beside it as HTML.
"""

from __future__ import annotations

from math import isnan

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.page.markup import Markup, element, number

WIDTH = 1000.0


def drawing(height: float, label: str, *children: Markup, zoomed: bool = True) -> Markup:
    """Return an SVG element as wide as the place it has.

    Args:
        height: in pixels.
        label: read out in its place.
        children: its paths.
        zoomed: whether it is one of those that follow when a reader zooms.
    """
    return element(
        "svg",
        element("title", label),
        *children,
        role="img",
        viewBox=f"0 0 {number(WIDTH)} {number(height)}",
        preserveAspectRatio="none",
        class_="x" if zoomed else None,
        style=f"height:{number(height)}px",
    )


def path(way: Markup, class_: str, told: str = "", worker: int | None = None) -> Markup:
    """Return a path in the colours of its class, with a text that is shown by a pointer on it.

    Args:
        way: of it; nothing is drawn where there is none.
        class_: of the style sheet.
        told: the text.
        worker: number of the worker that it is hidden with.
    """
    if not way:
        return Markup("")
    children = (element("title", told),) if told else ()
    return element("path", *children, d=way, class_=class_, data_worker=worker)


def steps_way(left: FloatArray, right: FloatArray, y: FloatArray) -> Markup:
    """Return the way of a line that is level from each left to its right edge.

    It is broken where a value is not a number or two neighbours do not touch.
    """
    way, pen = [], None
    for a, b, level in zip(left.tolist(), right.tolist(), y.tolist(), strict=True):
        if isnan(level):
            pen = None
            continue
        way.append(f"V{number(level)}" if pen is not None and a - pen < 1e-6 else _to(a, level))
        way.append(f"H{number(b)}")
        pen = b
    return Markup("".join(way))


def band_way(left: FloatArray, right: FloatArray, low: FloatArray, high: FloatArray) -> Markup:
    """Return the way around the area between two such lines, piece by piece."""
    known = ~(np.isnan(low) | np.isnan(high))
    touching = np.append(False, (left[1:] - right[:-1] < 1e-6) & known[1:] & known[:-1])
    starts = np.flatnonzero(known & ~touching)
    found = []
    for start in starts.tolist():
        end = start + 1
        while end < len(left) and touching[end]:
            end += 1
        rows = slice(start, end)
        if (np.abs(high[rows] - low[rows]) < 0.05).all():
            continue
        found.append(_around(left[rows], right[rows], low[rows], high[rows]))
    return Markup("".join(found))


def _around(left: FloatArray, right: FloatArray, low: FloatArray, high: FloatArray) -> str:
    there = [_to(float(left[0]), float(high[0]))]
    for b, level in zip(right.tolist(), np.append(high[1:], low[-1]).tolist(), strict=True):
        there += [f"H{number(b)}", f"V{number(level)}"]
    for a, level in zip(
        left[::-1].tolist(), np.append(low[::-1][1:], np.nan).tolist(), strict=True
    ):
        there.append(f"H{number(a)}")
        there.append("Z" if isnan(level) else f"V{number(level)}")
    return "".join(there)


def line_way(x: FloatArray, y: FloatArray) -> Markup:
    """Return the way through some points, broken where one is not a number."""
    way, begun = [], False
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if isnan(b):
            begun = False
            continue
        way.append(f"L{number(a)} {number(b)}" if begun else _to(a, b))
        begun = True
    return Markup("".join(way))


def dots_way(x: FloatArray, y: FloatArray) -> Markup:
    """Return the way of some dots: lines of no length, as their ends are round."""
    return Markup(
        "".join(
            f"{_to(a, b)}h0" for a, b in zip(x.tolist(), y.tolist(), strict=True) if not isnan(b)
        )
    )


def upright_way(x: FloatArray, height: float) -> Markup:
    """Return the way of lines from top to bottom."""
    return Markup("".join(f"{_to(a, 0.0)}V{number(height)}" for a in x.tolist()))


def level_way(y: FloatArray) -> Markup:
    """Return the way of lines from left to right."""
    return Markup("".join(f"{_to(0.0, b)}H{number(WIDTH)}" for b in y.tolist()))


def bars_way(left: FloatArray, right: FloatArray, top: float, bottom: float) -> Markup:
    """Return the way around bars of one height."""
    tall = bottom - top
    return Markup(
        "".join(
            f"{_to(a, top)}H{number(b)}v{number(tall)}H{number(a)}Z"
            for a, b in zip(left.tolist(), right.tolist(), strict=True)
            if b - a > 1e-3
        )
    )


def _to(x: float, y: float) -> str:
    return f"M{number(x)} {number(y)}"
