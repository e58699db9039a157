"""What a worker measured: a time is always paired with the share it was measured at."""

from __future__ import annotations

from dataclasses import dataclass

from evenstride.core.fleet import Shares


@dataclass(frozen=True, slots=True)
class Observation:
    """Consecutive steps of one worker, all at one share.

    Pairing a time with the latest decision instead makes every controller oscillate as soon
    as the data loader prefetches, because the decision runs ahead of the batch.

    Args:
        worker: rank of the worker in its fleet.
        share: samples it had in each of these steps; 0 is a ghost and is never modelled.
        first_step: global index of the first step.
        busy_s: per step, data + compute + the running median of the time between steps.
        wait_s: per step, time spent waiting for others (communication included).
        data_s: sum over the steps of the time spent waiting for the next batch.
        outside_s: sum of the time outside training (evaluation, saving) beyond the median.
        control_wait_s: sum of the time spent waiting for a decision.
        modelled: false for steps that say nothing about speed (the first of a pass).
    """

    worker: int
    share: int
    first_step: int
    busy_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    data_s: float = 0.0
    outside_s: float = 0.0
    control_wait_s: float = 0.0
    modelled: bool = True

    @property
    def steps(self) -> int:
        """Number of steps in the observation."""
        return len(self.busy_s)


def communication_s(observations: tuple[Observation, ...], shares: Shares) -> float | None:
    """Return the part of a step in seconds that is left when nobody waits for a slower worker.

    The slowest worker of a step waits for nothing but the communication, so it is the least of
    the workers' usual waits. ``None`` unless all workers with a share have reported.
    """
    waits: dict[int, tuple[float, ...]] = {}
    for seen in observations:
        if seen.modelled:
            waits[seen.worker] = waits.get(seen.worker, ()) + seen.wait_s
    if not waits or any(share and worker not in waits for worker, share in enumerate(shares)):
        return None
    return min(median(times) for times in waits.values())


def median(values: tuple[float, ...]) -> float:
    """Return the median of at least one value (the mean of the middle two of an even count)."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half])
