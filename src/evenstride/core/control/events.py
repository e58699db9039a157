"""What happens to a fleet, and what the leader must do about it: what `advance` takes and gives.

Workers are numbered by rank throughout, those without a share included.
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
    """A generation of workers has met and agreed on the settings."""

    generation: int  # 0 for the first; counts changes of membership
    step: int  # the first step this fleet will train
    global_batch: int  # ``B``, samples per step
    workers: tuple[Worker, ...]  # in rank order
    # That made this fleet of the one before, where some of it went on; those who came in get no
    # samples until they are ready. Empty if all have met anew, from equal weights
    happenings: tuple[Happening, ...] = ()


@dataclass(frozen=True, slots=True)
class Exchanged:
    """All ranks have told the leader what they measured."""

    step: int  # steps the leader had committed
    effective: int  # first step that no rank has drawn yet, so that a decision may change it
    observations: Measurements  # everything measured since the exchange before
    # The most memory that workers have held since then, as far as it is known
    memory: tuple[PeakMemory, ...] = ()
    last: bool = False  # whether the run ends, so that nobody would go by another decision
    # Number of the data's epoch that the next step belongs to; ``None`` if not known
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class OpeningSkipped:
    """The steps at the start do not wait for decisions, because the loader prefetches."""

    step: int


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """Workers of the group got a notice, had one withdrawn, or are ready.

    Those who enter the group or leave it make another group, of another `FleetFormed`.
    """

    step: int  # steps the leader had committed
    effective: int  # first step that no rank has drawn yet
    happenings: tuple[Happening, ...]  # in the order in which they became known
    save_s: float | None = None  # seconds that a checkpoint takes; ``None`` if the run takes none


@dataclass(frozen=True, slots=True)
class Recalled:
    """What an earlier generation knew of its workers has been read from a checkpoint."""

    step: int  # steps the leader had committed
    effective: int  # first step that no rank has drawn yet
    profiles: tuple[WorkerProfile, ...]  # of the workers then
    generation: int = 0  # that this one is, counting those of the checkpoint


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """All ranks stand where an epoch ends, with a global batch that is left open.

    Or where a pass begins for which another batch was restored: the bounds are that batch then.
    """

    step: int  # steps the leader had committed
    effective: int  # first step that no rank has drawn, with which the next epoch begins
    low: int  # smallest global batch that may be chosen
    high: int  # largest
    # Noise scale of the gradient in samples; ``None`` if it has no bound, or is not known
    scale: float | None = None
    scale_low: float | None = None  # lower end of its interval; ``None`` if nothing is known of it
    scale_high: float | None = None  # upper end; ``None`` if it has none


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """The steps of this run cannot be measured, so no decision can rest on times."""

    step: int  # steps the leader had committed; no rank has drawn it
    reason: str  # why, as a part of a sentence


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
    """Change nothing; tell the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class SetBatch:
    """Train ``global_batch`` samples per step from step ``effective`` on; shares follow."""

    effective: int
    global_batch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Expect:
    """Let a worker ask for an exchange when its time leaves ``expected_s * (1 +- band)``.

    Both have one entry per worker; an expected time of 0 means that nothing is expected yet.
    """

    expected_s: tuple[float, ...]
    band: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ExchangeAfter:
    """Exchange again after so many further steps of the leader.

    ``blocking`` steps wait for the exchange's decision before they are drawn, until the first split
    has been found.
    """

    steps: int
    blocking: bool


@dataclass(frozen=True, slots=True)
class SaveAfter:
    """Save a checkpoint on every rank when so many ``steps`` are committed."""

    steps: int
    reason: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """Let some ranks end once ``steps`` steps are committed, and saved if that was asked for."""

    steps: int
    ranks: tuple[int, ...]
    reason: str


Instruction = SetShares | KeepShares | SetBatch | Expect | ExchangeAfter | SaveAfter | LetGo
"""One part of a `Verdict`, as a trace records it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the core answers to an event, and what all ranks then apply.

    Iterating gives its parts as a trace records them, in the order in which they take effect.
    """

    effective: int  # first step the decision is about
    shares: Shares | None  # the ranks' new shares from that step on, or ``None`` to keep them
    # Whether the next step waits for a decision as well; such steps serve to find the first split
    # quickly, and end with the opening phase
    opening: bool = False
    expected_s: tuple[float, ...] = ()  # expected busy time of each rank; 0 for none
    band: tuple[float, ...] = ()  # half-width of each rank's band, as a part
    reason: str = ""  # one sentence
    # All ranks save a checkpoint when so many steps are committed; ``None`` for no
    save_after: int | None = None
    # When so many are, the ranks of ``going`` end; ``None`` if nobody does
    go_after: int | None = None
    going: tuple[int, ...] = ()  # these ranks
    why_going: str = ""  # for people
    # Global batch with which all go on who stand at a turn; ``None`` where not all do
    batch: int | None = None
    why_batch: str = ""  # for people, where it is another batch
    exchange_after: int = 1  # steps of the leader until the next exchange
    judges: bool = True  # whether the shares were looked at, be they kept or not

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
