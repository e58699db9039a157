"""Colours that people with any kind of colour vision tell apart, and what tells them apart besides.

Source:
    Okabe and Ito, "Color Universal Design" (2008), https://jfly.uni-koeln.de/color/. Its yellow is
    left out: lines in it are not seen on white.
"""

from __future__ import annotations

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("", "7 3", "2 3", "9 3 2 3")
BUSY, WAITING, COMMUNICATION, APART = "#0072B2", "#E69F00", "#7f7f7f", "#e6e6e6"


def look(number: int) -> str:
    """Return the classes of a worker's lines: six colours, and another dash for each next six.

    >>> look(0), look(7)
    ('c0 d0', 'c1 d1')
    """
    return f"c{number % len(COLORS)} d{dash(number)}"


def dash(number: int) -> int:
    """Return the number of a worker's dash; with the colour it repeats after 24 workers."""
    return number // len(COLORS) % len(DASHES)
