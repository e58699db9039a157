"""Colours that people with any kind of colour vision tell apart, and what tells them apart besides.

Source:
    Okabe and Ito, "Color Universal Design" (2008), https://jfly.uni-koeln.de/color/. Its yellow is
    left out: lines in it are not seen on white.
"""

from __future__ import annotations

from typing import Literal

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("", "7 3", "2 3", "9 3 2 3")
BUSY, WAITING, COMMUNICATION, APART = "#0072B2", "#E69F00", "#7f7f7f", "#e6e6e6"


Dashes = Literal["-", "--", ":", "-."]
_DASHES: tuple[Dashes, ...] = ("-", "--", ":", "-.")
_NAMED: dict[str, tuple[str, Dashes]] = {
    "own": (COLORS[0], "-"),
    "equal": (COLORS[1], ":"),
    "best": (COLORS[2], "--"),
}


def pen_of(style: str) -> tuple[str, Dashes]:
    """Return the colour and the dashes of classes of the style sheet, for matplotlib.

    >>> pen_of("line c1 d1"), pen_of("line best")
    (('#D55E00', '--'), ('#009E73', '--'))
    """
    words = style.split()
    for word in words:
        if word in _NAMED:
            return _NAMED[word]
    numbers = {word[0]: int(word[1:]) for word in words if word[1:].isdigit()}
    if "c" in numbers:
        return COLORS[numbers["c"]], _DASHES[numbers.get("d", 0)]
    return (COLORS[0] if "range" in words else "black"), "-"


def look(number: int) -> str:
    """Return the classes of a worker's lines: six colours, and another dash for each next six.

    >>> look(0), look(7)
    ('c0 d0', 'c1 d1')
    """
    return f"c{number % len(COLORS)} d{dash(number)}"


def dash(number: int) -> int:
    """Return the number of a worker's dash; with the colour it repeats after 24 workers."""
    return number // len(COLORS) % len(DASHES)
