"""Events of a fleet and the leader's instructions: the input and output of `advance`.

Workers are numbered by rank throughout, including those without a share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from evenstride.core.arrays import Shares
from evenstride.core.fleet import Worker
from evenstride.core.membership.member_table import Happening
from evenstride.core.membership.worker_profiles import WorkerProfile
from evenstride.core.time_model.observation import Measurements, PeakMemory


@dataclass(frozen=True, slots=True)
class FleetFormed:
    """A generation of workers has started and agreed on the settings."""

    generation: int  # number of changes of membership; 0 for the first
    step: int  # the first step that this fleet trains
    global_batch: int  # ``B``, samples per step
    workers: tuple[Worker, ...]  # in rank order
    # The changes that led from the previous fleet to this one, if part of it continued. Workers
    # that joined get no samples until they are ready. Empty if all workers start with equal weights
    happenings: tuple[Happening, ...] = ()


@dataclass(frozen=True, slots=True)
class Exchanged:
    """All ranks have sent their measurements to the leader."""

    step: int  # number of steps that the leader has committed.
    effective: int  # first step that no rank has drawn yet, so that a decision can change it.
    observations: Measurements  # everything measured since the previous exchange.
    # The largest memory peaks of workers since then, as far as known.
    memory: tuple[PeakMemory, ...] = ()
    last: bool = False  # whether the run ends, so that no rank would apply a decision.
    epoch: int | None = None  # of the latest step, in the data; ``None`` if not known
    epoch_over: bool = False  # whether all ranks are at the end of that epoch
    # Seconds that the leader usually takes for a decision with its messages and reports. 0 if not
    # known.
    decision_s: float = 0.0
    # Whether the model is compiled for each share, so that first steps at new shares are slow.
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class OpeningSkipped:
    """The first steps do not wait for decisions, because the loader prefetches."""

    step: int


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """Workers of the group received a notice, had one withdrawn, or are ready.

    Workers that join or leave the process group form another group, with its own `FleetFormed`.
    """

    step: int  # number of steps that the leader has committed
    effective: int  # first step that no rank has drawn yet
    happenings: tuple[Happening, ...]  # in the order in which they became known
    save_s: float | None = None  # seconds per checkpoint; ``None`` if the run saves none


@dataclass(frozen=True, slots=True)
class Recalled:
    """What an earlier generation knew about its workers has been read from a checkpoint."""

    step: int  # number of steps that the leader has committed
    effective: int  # first step that no rank has drawn yet
    profiles: tuple[WorkerProfile, ...]  # of the earlier workers
    generation: int = 0  # number of this generation, counting those of the checkpoint


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """All ranks are at the end of an epoch, and the size of the global batch is open.

    Or a pass begins for which another batch was restored; both bounds are that batch then.
    """

    step: int  # number of steps that the leader has committed.
    effective: int  # first step that no rank has drawn, the first of the next epoch.
    low: int  # smallest global batch that may be chosen.
    high: int  # largest.
    # Noise scale of the gradient in samples; ``None`` if unbounded or not known.
    scale: float | None = None
    scale_low: float | None = None  # lower end of its interval; ``None`` if not known
    scale_high: float | None = None  # upper end; ``None`` if unbounded


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """The steps of this run cannot be measured, so decisions cannot use times."""

    step: int  # number of steps that the leader has committed; no rank has drawn this step
    reason: str  # clause for the decision's reason


Event = (
    FleetFormed | Exchanged | OpeningSkipped | MembersChanged | Recalled | EpochEnded | NotMeasured
)


@dataclass(frozen=True, slots=True)
class SetShares:
    """Use ``shares`` from step ``effective`` on, on every rank."""

    effective: int
    shares: Shares
    reason: str


@dataclass(frozen=True, slots=True)
class KeepShares:
    """Change nothing; report the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class SetBatch:
    """Train ``global_batch`` samples per step from step ``effective`` on; shares follow."""

    effective: int
    global_batch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Expect:
    """Let a worker request an exchange when its time leaves ``expected_s * (1 +- band)``.

    Smaller deviations add up to a request, too (`ToleranceBand`). Both have one entry per worker;
    an expected time of 0 disables the check.
    """

    expected_s: tuple[float, ...]
    band: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ExchangeAfter:
    """Exchange again after this number of further steps of the leader.

    ``blocking`` steps wait for the exchange's decision before they are drawn, until the first split
    is found.
    """

    steps: int
    blocking: bool


@dataclass(frozen=True, slots=True)
class SaveAfter:
    """Save a checkpoint on every rank when ``steps`` steps are committed."""

    steps: int
    reason: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """Let some ranks exit once ``steps`` steps are committed, and saved if requested."""

    steps: int
    ranks: tuple[int, ...]
    reason: str


Instruction = SetShares | KeepShares | SetBatch | Expect | ExchangeAfter | SaveAfter | LetGo
"""One part of a `Verdict`, as a trace records it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The core's answer to an event, which all ranks then apply.

    Iteration yields its parts as a trace records them, in the order in which they take effect.
    """

    effective: int  # first step to which the decision applies.
    shares: Shares | None  # the ranks' new shares from that step on, or ``None`` to keep them.
    # Whether the next step also waits for a decision; such steps find the first split quickly and
    # end with the opening.
    opening: bool = False
    expected_s: tuple[float, ...] = ()  # expected busy time of each rank; 0 if unknown
    band: tuple[float, ...] = ()  # half-width of each rank's band, as a fraction
    reason: str = ""  # one sentence
    # All ranks save a checkpoint when this number of steps is committed; ``None`` for no save
    save_after: int | None = None
    # Number of committed steps at which the ranks of ``going`` exit; ``None`` if no rank does
    go_after: int | None = None
    going: tuple[int, ...] = ()  # these ranks
    why_going: str = ""  # reason to display
    # Global batch from the epoch boundary on; ``None`` if the event is not an epoch boundary
    batch: int | None = None
    why_batch: str = ""  # reason to display, if the batch changes
    exchange_after: int = 1  # steps of the leader until the next exchange
    judges: bool = True  # whether the policy evaluated the shares, even if it keeps them

    def __iter__(self) -> Iterator[Instruction]:
        if self.batch is not None:
            yield SetBatch(self.effective, self.batch, self.why_batch)
        if self.shares is not None:
            yield SetShares(self.effective, self.shares, self.reason)
        elif self.judges:
            yield KeepShares(self.reason)
        if self.expected_s:
            yield Expect(self.expected_s, self.band)
        yield ExchangeAfter(self.exchange_after, self.opening)
        if self.save_after is not None:
            yield SaveAfter(self.save_after, self.reason)
        if self.go_after is not None:
            yield LetGo(self.go_after, self.going, self.why_going)
