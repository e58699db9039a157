"""Warns about versions of other libraries that were not tested."""

from __future__ import annotations

import logging
import re
from importlib.metadata import version

logger = logging.getLogger("evenstride")
_warned: set[str] = set()


def warn_if_untested(package: str, oldest: str, newest: str) -> None:
    """Warn once if a package's version, by major and minor number, is outside the tested range."""
    found = version(package)
    if package in _warned or _release(oldest) <= _release(found) <= _release(newest):
        return
    _warned.add(package)
    tested = oldest if oldest == newest else f"{oldest} to {newest}"
    logger.warning(
        "%s %s is installed, but evenstride was tested with %s %s; if something fails, install a "
        "tested version",
        package,
        found,
        package,
        tested,
    )


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
