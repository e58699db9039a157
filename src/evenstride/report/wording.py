"""Times and names as people read them, and nothing else that a terminal or page might act on."""

from __future__ import annotations

import unicodedata
from math import isfinite

from evenstride.core.formatting import time_text
from evenstride.report.text_tables import NOTHING

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def duration(seconds: float | None) -> str:
    """Return a time with its unit, in three significant figures.

    >>> [duration(s) for s in (0.1333, 2.5, 1234.5, 7200.0, None)]
    ['133 ms', '2.5 s', '1234 s', '2 h', '–']
    """
    return NOTHING if seconds is None or not isfinite(seconds) else time_text(seconds)


def plain(text: object, most: int = 1000) -> str:
    """Return a text without control characters, cut to a length.

    Names of hosts, files and metrics are others' texts: one could hold a terminal's escape
    sequence, or characters that turn the direction of writing.

    >>> plain("host" + chr(27) + "[31m/0" + chr(10))
    'host�[31m/0�'
    """
    told = "".join("�" if unicodedata.category(c) in _HIDDEN else c for c in str(text))
    return told if len(told) <= most else f"{told[: most - 1]}…"


def not_measured_text(reason: str) -> str:
    """Return the sentences about a run whose steps could not be measured."""
    return (
        f"Not measured: {reason}. The shares stayed as they were set at the start, and evenstride "
        "does not know who worked and who waited."
    )
