"""Which job of a bag a transient machine should take, by its age.

A job that is killed starts again on a new machine. Let ``p`` be the chance to finish on a machine,
and ``m`` the mean time that a job spends there, killed or not. The job needs ``m + (1 - p) n`` in
all, where ``n = (start + m_new) / p_new`` is the same on a new machine. So a machine is better than
a new one if ``m / p`` is at most ``n``. Machines that have survived frequent early losses are
better, and are reused. Near the end of its life, a machine is worse, and is given back.
"""

from __future__ import annotations

import numpy as np

from evenstride.core.arrays import FloatArray
from evenstride.core.reliability.lifetimes import Lifetime
from evenstride.errors import ConfigError

_ROUNDING = 1e-9  # relative; at a constant rate, no machine is better than another


def chance_to_finish(lifetime: Lifetime, age_s: float, work_s: FloatArray) -> FloatArray:
    """Return the probability that a machine outlives some work; 0 beyond the end of its life.

    Args:
        lifetime: of one machine.
        age_s: of the machine now, in seconds.
        work_s: of each job, ``(jobs,)``.
    """
    alive = float(lifetime.survival(age_s))
    return np.asarray(lifetime.survival(age_s + work_s) / alive if alive else np.zeros_like(work_s))


def place(lifetime: Lifetime, age_s: float, work_s: FloatArray, start_s: float = 0.0) -> int | None:
    """Return the number of the waiting job that a machine should take.

    It is the longest job that fits into the expected remaining life, or else the shortest one. Jobs
    that a new machine would finish in less time are left out.

    Args:
        lifetime: of one machine.
        age_s: of the machine now, in seconds.
        work_s: remaining work of each waiting job in seconds, ``(jobs,)``, above 0.
        start_s: time that a new machine needs before it can work.

    Returns:
        A place in ``work_s``. ``None`` if a new machine is better for all jobs: give this one back.

    Raises:
        ConfigError: there is no job, or one has no work.

    Source:
        The choice between a machine and a new one by expected running times is the policy of
        Kadupitiya, Jadhao and Sharma, HPDC 2020, doi:10.1145/3369583.3392671, as remembered: only
        the abstract was read. The rule for the order of jobs is ours.

    >>> from evenstride.core.reliability import Bathtub
    >>> hour, hours = 3600.0, np.array([2.0, 6.0, 12.0])
    >>> tub = Bathtub(a=0.45, tau1_s=hour, tau2_s=0.8 * hour, b_s=24 * hour)
    >>> [place(tub, age * hour, hours * hour) for age in (0.0, 8.0, 14.0, 21.0, 23.5)]
    [2, 2, 1, 0, None]
    """
    if not len(work_s) or not (work_s > 0.0).all():
        raise ConfigError(
            f"cannot place {len(work_s)} jobs, {int((work_s > 0.0).sum())} of them with work above "
            "0 s: expected at least one job, and work for each; leave out finished jobs"
        )
    chance, spent_s = _attempt(lifetime, age_s, work_s)
    chance_new, spent_new_s = _attempt(lifetime, 0.0, work_s)
    # Multiplied by both chances, because a job may be too long for any machine.
    better = spent_s * chance_new <= (start_s + spent_new_s) * chance * (1.0 + _ROUNDING)
    if not better.any() or float(lifetime.survival(age_s)) <= 0.0:
        return None
    fits = better & (work_s <= float(lifetime.mean_left_s(age_s)))
    if fits.any():
        return int(np.argmax(np.where(fits, work_s, 0.0)))
    return int(np.argmin(np.where(better, work_s, np.inf)))


def _attempt(lifetime: Lifetime, age_s: float, work_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the chance that a machine finishes each job, and the mean time that it spends."""
    chance = chance_to_finish(lifetime, age_s, work_s)
    after_s = np.where(chance > 0.0, chance * lifetime.mean_left_s(age_s + work_s), 0.0)
    return chance, np.asarray(lifetime.mean_left_s(age_s) - after_s)
