"""One generation of workers, from the forming of its group to the next one's."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from evenstride.core.allocation.memory_model import PeakMemory
from evenstride.core.allocation.speedup import Yardstick
from evenstride.core.fleet import FloatArray, Shares
from evenstride.core.time_model.curve_estimates import CurveEstimates
from evenstride.report.analysis.step_table import StepTable


@dataclass(frozen=True, slots=True)
class RecordedDecision:
    """What the leader decided.

    Args:
        step: first step that it holds for.
        at_s: when, in seconds since the process began.
        shares: of all ranks, samples; ``None`` where nothing was changed.
        reason: one sentence, as the controller gave it.
    """

    step: int
    at_s: float
    shares: Shares | None
    reason: str


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that happened to the group, or a note of the run."""

    step: int
    at_s: float  # since the process began
    text: str


@dataclass(slots=True, eq=False)
class RecordedGeneration:
    """One generation of workers, filled while its trace is read.

    Args:
        life: number of the process in the run, from 0.
        number: of the generation: 0 for the first, as the process counts them.
        global_batch: samples of a step.
        workers: names, in rank order.
        table: times and shares of their steps.
        lockstep: whether all take the same steps; else nobody waits for another.
        met: whether its workers met when it began; else they went on with another global batch.
        decisions: in order.
        incidents: in order.
        anchors: seconds since the process began at which so many steps were committed.
        held: the latest that is known of each rank's memory.
        memory: all that was told of it, with the seconds since the process began.
        standing: what each rank is to the run at the end.
        not_measured: why its steps could not be measured; empty if they could.
        curves: of the ranks that serve, as they were fitted at the end, with their ``serving``
            ranks; ``None`` if not all were measured.
    """

    life: int
    number: int
    global_batch: int
    workers: tuple[str, ...]
    table: StepTable
    lockstep: bool = True
    met: bool = True
    decisions: list[RecordedDecision] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    anchors: list[tuple[float, int]] = field(default_factory=list)
    held: dict[int, PeakMemory] = field(default_factory=dict)
    memory: list[tuple[float, PeakMemory]] = field(default_factory=list)
    standing: tuple[str, ...] = ()
    not_measured: str = ""
    curves: CurveEstimates | None = None
    serving: tuple[int, ...] = ()
    _judged_s: FloatArray = field(default_factory=lambda: np.zeros((2, 0)))
    _looked_at: int = 0
    _late: list[int] = field(default_factory=list)

    @property
    def first(self) -> int:
        """Number of its first step in its process."""
        return self.table.first

    @property
    def steps(self) -> int:
        """How many steps it has told of."""
        return len(self.table)

    @property
    def shares(self) -> Shares:
        """The shares that were set last; empty if none were."""
        return next((one.shares for one in reversed(self.decisions) if one.shares), ())

    @property
    def slowest_s(self) -> FloatArray:
        """Own work of each step's slowest worker; not a number unless all have told of it."""
        if not self.steps:
            return np.zeros(0)
        return np.asarray(self.table.busy_s.max(axis=1))

    @property
    def equal_s(self) -> FloatArray:
        """What the equal split would have made of each step, without communication, ``(steps,)``.

        Not a number where that is not known.
        """
        return np.asarray(self.other_s[0])

    @property
    def best_s(self) -> FloatArray:
        """What the best split would have made of each step, likewise."""
        return np.asarray(self.other_s[1])

    @property
    def other_s(self) -> FloatArray:
        """Both of them, ``(2, steps)``."""
        self._make_room()
        return self._judged_s[:, : self.steps]

    @property
    def judged(self) -> npt.NDArray[np.bool_]:
        """Which steps could be compared with other splits, ``(steps,)``."""
        return np.asarray(~np.isnan(self.best_s), dtype=np.bool_)

    def leave_unmeasured(self, reason: str) -> None:
        """Note why its steps could not be measured."""
        self.not_measured = reason

    def hold(self, at_s: float, told: tuple[PeakMemory, ...]) -> None:
        """Take what ranks told of their memory, so many seconds since the process began."""
        self.memory += [(at_s, one) for one in told]
        self.held.update({one.worker: one for one in told})

    def remember(
        self, standing: tuple[str, ...], curves: CurveEstimates | None, serving: tuple[int, ...]
    ) -> None:
        """Keep what is known of the ranks at present."""
        self.standing = standing
        if curves is not None:
            self.curves, self.serving = curves, serving

    def judge(self, yardstick: Yardstick | None) -> None:
        """Compare the steps that have become whole with the equal and the best split.

        Each is judged by the curves of the time when it did, as the run itself judges.

        Args:
            yardstick: by those curves; ``None`` if they are not known.
        """
        rows = self._fresh()
        self._make_room()
        if yardstick is None or not len(rows):
            return
        slowest_s = self.table.busy_s[rows].max(axis=1)  # of these alone: judging is not quadratic
        self._judged_s[:, rows] = yardstick.judge(self.table.share[rows], slowest_s)

    def _fresh(self) -> npt.NDArray[np.int64]:
        """Return the rows that have become whole since the last call."""
        late = np.array(self._late, dtype=np.int64)
        rows = np.concatenate([late, np.arange(self._looked_at, self.steps)])
        whole = ~np.isnan(self.table.busy_s[rows]).any(axis=1)
        self._looked_at, self._late = self.steps, rows[~whole].tolist()[-4096:]
        return np.asarray(rows[whole])

    def _make_room(self) -> None:
        have = self._judged_s.shape[1]
        if self.steps > have:
            nothing = np.full((2, max(self.steps, 2 * have) - have), np.nan)
            self._judged_s = np.concatenate([self._judged_s, nothing], axis=1)
