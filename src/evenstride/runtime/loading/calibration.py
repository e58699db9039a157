"""Serve batches of chosen sizes, each for a while: how a script's true curve is measured.

``EVENSTRIDE_CALIBRATE=0.333:1.5,0.2:1.5`` makes a lone process train on 0.333 of the global
batch for 1.5 seconds, then on 0.2 of it, and then end; its trace holds the times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from evenstride.core.spec import numbers
from evenstride.errors import ConfigError

_FEWEST_STEPS = 4


@dataclass(frozen=True, slots=True)
class CalibrationStage:
    """One batch size and how long it is served.

    Args:
        part: of the global batch.
        seconds: at least so long, and at least a few steps.
    """

    part: float
    seconds: float


def parse_stages(text: str) -> tuple[CalibrationStage, ...]:
    """Return the stages in ``PART:SECONDS,...``.

    Raises:
        ConfigError: it is not understood.
    """
    pairs = [numbers(stage.replace(":", ",")) for stage in text.split(",")]
    stages = tuple(CalibrationStage(*pair) for pair in pairs if len(pair) == 2)
    if len(stages) < len(pairs) or not all(0 < s.part <= 1 and s.seconds >= 0 for s in stages):
        raise ConfigError(
            f"EVENSTRIDE_CALIBRATE is {text!r}; write PART:SECONDS,... with parts of the global "
            "batch above 0 and at most 1, such as 0.333:1.5,0.2:1.5"
        )
    return stages


def batch_sizes(
    stages: tuple[CalibrationStage, ...],
    global_batch: int,
    now: Callable[[], float] = time.perf_counter,
) -> Iterator[int]:
    """Yield the size of each step, until every stage has had its time."""
    for stage in stages:
        size = max(1, round(stage.part * global_batch))
        started_s, steps = now(), 0
        while steps < _FEWEST_STEPS or now() < started_s + stage.seconds:
            yield size
            steps += 1


def calibration(text: str | None, world_size: int, global_batch: int) -> Iterator[int] | None:
    """Return the batch sizes that a calibration asks for, if this run is one.

    Args:
        text: ``EVENSTRIDE_CALIBRATE``.
        world_size: number of ranks.
        global_batch: of the `Stride`.

    Raises:
        ConfigError: it is not understood, or there are several ranks.
    """
    if text is None:
        return None
    stages = parse_stages(text)
    if world_size > 1:
        raise ConfigError(
            "EVENSTRIDE_CALIBRATE measures one process on its own, but there are "
            f"{world_size}; unset it, or set WORLD_SIZE=1"
        )
    return batch_sizes(stages, global_batch)
