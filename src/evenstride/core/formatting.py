"""Numbers and lists as text for the reasons, alerts, messages and summaries of a run."""

from __future__ import annotations

from collections.abc import Iterable

# The unit is the largest one in which the rounded time is at least 1.
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_HOUR_S, _DAY_S = 3600.0, 86400.0
# Shorter times are below the resolution of measurements.
_SHORTEST_S = 1e-9


def time_text(seconds: float) -> str:
    """Return a time with its unit, in three significant figures; ``inf`` or ``nan`` as days.

    From 1000 s on, it is in whole seconds; from 2 hours on, in hours; from 2 days on, in days.

    >>> [time_text(s) for s in (2e-05, 0.0123, 0.99996, 12.34, 1234.5)]
    ['20 us', '12.3 ms', '1 s', '12.3 s', '1234 s']
    >>> [time_text(s) for s in (7200.0, 5e6, 1e12)]
    ['2 h', '57.9 days', '11,574,074 days']
    """
    size = abs(float(f"{seconds:.2e}"))
    if size < _SHORTEST_S:
        return "0 ms"
    if size < 1e3:
        unit_s, name = next((one for one in _UNITS if size >= one[0]), _UNITS[-1])
        return f"{seconds / unit_s:.3g} {name}"
    if abs(seconds) < 2 * _HOUR_S:
        return f"{seconds:.0f} s"
    if abs(seconds) < 2 * _DAY_S:
        return f"{seconds / _HOUR_S:.3g} h"
    days = seconds / _DAY_S
    return f"{days:.3g} days" if abs(days) < 999.5 else f"{days:,.0f} days"


def signed_part(part: float, words: tuple[str, str] = ("faster", "slower")) -> str:
    """Return a signed fraction as a percentage without sign, and the word for its direction.

    ``words`` are those for at least 0 and for less. A fraction that rounds to 0 gets the first.

    >>> signed_part(0.034), signed_part(-0.007), signed_part(-0.0001, ("less", "more"))
    ('3.4% faster', '0.7% slower', '0.0% less')
    """
    text = f"{abs(part):.1%}"
    return f"{text} {words[part < 0 and text != '0.0%']}"


def listed(names: Iterable[str], most: int) -> str:
    """Return the first names with commas, and how many more there are.

    >>> listed(["a", "b"], 2), listed(["a", "b", "c", "d"], 2)
    ('a, b', 'a, b and 2 more')
    """
    every = list(names)
    more = len(every) - most
    return ", ".join(every[:most]) + (f" and {more} more" if more > 0 else "")
