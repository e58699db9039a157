"""Speed-up, bound and efficiency of a comparison, from the warm blocks of its rounds.

Every policy runs in every round. So each ratio follows from pairs of blocks that ran close to each
other, and the drift of the machine cancels.

The bound needs the step time of the best possible split. It follows from the busy times of all
workers in the same round, in which they trained together. Times that were measured apart from
training do not fit: in three demos on two cores (25 November 2026), the slowest worker's equal step
took 3 to 6 % longer in training. There it also loads samples and averages gradients, and at a fifth
of a core each millisecond of such work takes five. Besides, a worker that waits loses the rest of
its quota in that period of the CPU limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evenstride.core.allocation.speedup import Prospect
from evenstride.lab.comparison.comparison_result import Curve
from evenstride.lab.comparison.paired_ratios import (
    UNCERTAIN,
    Ratio,
    Rounds,
    geometric_mean,
    middle_mean,
    paired_ratio,
)
from evenstride.lab.comparison.trace_figures import Work

_EQUAL = "uniform"
_FEWEST = 0.25  # steps at a share, relative to the most frequent share, for a point of a curve


@dataclass(frozen=True, slots=True)
class Ratios:
    """What a comparison found."""

    speedup: Ratio | None  # ``None`` without the equal split
    bound: Ratio | None  # ``None`` without busy times
    of_bound: Ratio | None  # speed-up divided by bound
    efficiency: dict[str, Ratio] = field(default_factory=dict)  # by policy
    oracle: str | None = None  # policy of the fastest fixed split
    pairs: int = 0

    uncertainty: float = 0.0  # of the speed-up and of the balanced policy's efficiency

    @property
    def disturbed(self) -> bool:
        return self.uncertainty > UNCERTAIN

    def fields(self) -> dict[str, Any]:
        """Return the fields of a `Comparison` that hold ratios, and how certain they are."""
        ratios = {"speedup": self.speedup, "bound": self.bound, "of_bound": self.of_bound}
        return {
            **{name: one.value if one else None for name, one in ratios.items()},
            **{f"{name}_interval": one.interval if one else None for name, one in ratios.items()},
            "pairs": self.pairs,
            "uncertainty": round(self.uncertainty, 4),
        }


def compare_blocks(
    blocks_s: Mapping[str, Rounds],
    balanced: str,
    fixed: Sequence[str] = (),
    prospects: Sequence[Prospect] = (),
    drift: float = 0.0,
) -> Ratios:
    """Return the ratios of a comparison.

    Args:
        blocks_s: step times of the warm blocks, by policy.
        balanced: the policy whose speed-up counts.
        fixed: policies with a fixed split.
        prospects: of each round, from the busy times in it; empty for no bound.
        drift: change of the machine's speed that the intervals allow for, as a fraction; 0 if
            the pairs show it.
    """
    oracle = min(fixed, key=lambda policy: geometric_mean(blocks_s[policy])) if fixed else None
    ours, equal = blocks_s[balanced], blocks_s.get(_EQUAL)
    best = [[one.best_s] * len(some) for one, some in zip(prospects, ours, strict=False)]

    def ratio(above: Rounds | None, below: Rounds) -> Ratio | None:
        return paired_ratio(above, below).widened(drift) if above and below else None

    against = blocks_s[oracle] if oracle is not None else None
    efficiency = {policy: ratio(against, times_s) for policy, times_s in blocks_s.items()}
    speedup = ratio(equal, ours)
    judged = [one.half_width for one in (speedup, efficiency[balanced]) if one is not None]
    return Ratios(
        speedup=speedup,
        bound=ratio(equal, best) or ratio([[one.equal_s] for one in prospects], _column(best)),
        of_bound=ratio(best, ours) if equal else None,
        efficiency={policy: one for policy, one in efficiency.items() if one is not None},
        oracle=oracle,
        pairs=sum(map(len, ours)),
        uncertainty=max((half for half in judged if half is not None), default=0.0),
    )


def _column(rounds: Rounds) -> Rounds:
    return [some[:1] for some in rounds]


def busy_curves(work: Sequence[Work]) -> list[Curve]:
    """Return the time curve of each worker from its busy times in training.

    Shares of few steps are left out if there are others.
    """
    curves: list[Curve] = []
    for mine in work:
        times_s: dict[int, list[float]] = {}
        for share, busy_s in mine:
            times_s.setdefault(share, []).append(busy_s)
        fewest = _FEWEST * max(map(len, times_s.values()), default=0)
        curves.append({n: middle_mean(t) for n, t in times_s.items() if len(t) >= fewest})
    return curves


def completed(curves: Sequence[Curve], calibrated: Sequence[Curve]) -> list[Curve]:
    """Return the curves, with the calibrated one for each worker of fewer than two shares."""
    return [own if len(own) > 1 else other for own, other in zip(curves, calibrated, strict=True)]
