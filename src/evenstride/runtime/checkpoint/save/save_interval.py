"""When a checkpoint is due: every so many steps, every so often, or as often as is best."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from evenstride.core.reliability.checkpoint_interval import Saving
from evenstride.core.spec import duration_s
from evenstride.errors import ConfigError

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# After failures in a row so many due steps are left out before the next try.
_MOST_LEFT_OUT = 7


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """How often to save: one of the three.

    Args:
        steps: between two saves; 0 if they go by time.
        interval_s: seconds between two saves, by the leader's clock; 0 if they go by steps.
        auto: whether the interval follows from the cost of a save.
        saving: how it does; ``None`` for the usual way.
    """

    steps: int = 0
    interval_s: float = 0.0
    auto: bool = False
    saving: Saving | None = None

    def __str__(self) -> str:
        """Return it as a user would say it; alike only where it is alike.

        An object of the user's own that does not say what it is shows its address, which is another
        one on each rank and is left out.
        """
        if self.auto:
            return f"auto, by {_ADDRESS.sub('', repr(self.saving))}" if self.saving else "auto"
        if self.steps:
            return "every step" if self.steps == 1 else f"every {self.steps} steps"
        return f"every {repr(self.interval_s).removesuffix('.0')} s"

    def after(self, step: int) -> float:
        """Return the next step at which a save is due; infinity if they go by time."""
        return (step // self.steps + 1) * self.steps if self.steps else math.inf

    @property
    def by_clock(self) -> bool:
        """Whether somebody has to look at a clock."""
        return not self.steps


def parse_every(every: Any) -> SaveInterval:
    """Return the cadence of what a user asked for.

    Raises:
        ConfigError: it is no number of steps, no duration, and not "auto".
    """
    if every == "auto":
        return SaveInterval(auto=True)
    if isinstance(every, Saving):
        return SaveInterval(auto=True, saving=every)
    if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
        return SaveInterval(steps=every)
    if isinstance(every, timedelta) and every > timedelta():
        return SaveInterval(interval_s=every.total_seconds())
    interval_s = duration_s(every) if isinstance(every, str) else None
    if interval_s:
        return SaveInterval(interval_s=interval_s)
    raise ConfigError(
        f"every={every!r} says nothing; give a number of steps of at least 1, a duration such as "
        '"30s", "5min" or a timedelta, "auto", or a Saving'
    )


def left_out(failures: int) -> int:
    """Return how many due steps are left out after so many failures in a row: 0, 1, 3, then 7.

    >>> [left_out(failures) for failures in range(6)]
    [0, 0, 1, 3, 7, 7]
    """
    return min((1 << max(failures - 1, 0)) - 1, _MOST_LEFT_OUT)
