"""A warning for releases of another library that were not tested."""

from __future__ import annotations

import logging
import re
from functools import cache
from importlib.metadata import version

logger = logging.getLogger("evenstride")


@cache  # once per process
def warn_if_untested(package: str, oldest: str, newest: str) -> None:
    """Log a warning if the installed release is outside of the tested range.

    Args:
        package: Name of the distribution.
        oldest: First tested release, as ``major.minor``.
        newest: Last tested release, as ``major.minor``.
    """
    installed = version(package)
    if not _release(oldest) <= _release(installed) <= _release(newest):
        logger.warning(
            "%s %s is installed, but this integration was tested with %s to %s; check that the "
            "first losses are those of a run without it",
            package,
            installed,
            oldest,
            newest,
        )


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
