"""How epochs are laid out, how far training has been committed, and where the batch changes.

A global batch may change where an epoch ends and nowhere else, so that each step's window is known
from the position in the data alone. Every rank stands still there until all have told the leader so
in one and the same exchange. Nobody has drawn the next step then, whatever its loader prefetches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from evenstride.core.fleet import Shares
from evenstride.core.sampling.draw import ShardAssignment
from evenstride.core.sampling.partition import EpochCursor
from evenstride.errors import ConfigError
from evenstride.runtime.coordination.draw_barrier import BatchChange, Position
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits
from evenstride.runtime.loading.shards import digest
from evenstride.runtime.noise.noise_meter import NoiseMeter
from evenstride.runtime.timing.device_timer import RankClock

POSITION_VERSION = 2  # 1 had another order of the samples
_STANDS = 8


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """How an epoch is laid out; the same on all ranks."""

    length: int  # samples in the data set
    seed: int  # of the order and of the samples' randomness
    shuffle: bool = True  # false to keep the data set's own order
    drop_last: bool = False  # leave the last, incomplete global batch out
    by_epoch: bool = False  # each worker keeps to a part of the data set for a whole epoch
    shards: Shares = ()  # samples in each shard, for data that is read shard by shard
    lanes: tuple[int, ...] = ()  # shards that each worker reads in turn, where there are any

    def dealing(self, epoch: int) -> ShardAssignment | None:
        """Return how an epoch of shards begins; nothing for other data."""
        if not self.shards:
            return None
        return ShardAssignment.of(self.shards, self.lanes, self.seed, epoch, shuffle=self.shuffle)


@dataclass(frozen=True, slots=True)
class Saved:
    """A run's position as a checkpoint holds it."""

    seed: int
    epoch: int
    position: int
    step: int
    global_batch: int
    length: int | None
    shuffle: bool
    drop_last: bool
    by_epoch: bool
    parts: tuple[int, ...]
    shards: str
    left: dict[str, Any] | None


@dataclass(slots=True)
class CommittedPosition:
    """The committed position of one rank."""

    seed: int
    global_batch: int
    epoch: int = 0
    step: int = 0  # committed by this process; it only ever grows
    # Steps committed before, in the run whose state was loaded. Where workers do not keep step,
    # what others have made since is in it as well, once an epoch has ended.
    earlier: int = 0
    loaded: int = 0  # of ``earlier``, those of the state that was loaded
    position: int = 0  # samples committed in the current epoch
    order: EpochOrder | None = None  # once there is a loader
    end: int = 0  # samples of an epoch that are trained
    # Whether nothing has been trained yet in the current pass. A pass that ends so (a look at the
    # data, before a state is loaded, say) is nobody else's concern.
    untrained_pass: bool = True
    # What an exchange reports: (step, epoch, position) where the latest passes that trained began.
    stands: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=_STANDS))
    # The state that was loaded, until a loader has been checked against it.
    restored: Saved | None = None
    parts: tuple[int, ...] = ()  # shares that cut the data set when the current epoch began
    dealing: ShardAssignment | None = None  # what is left of the shards in the current epoch
    # Whether a state of another global batch may be loaded, and is gone on from with the own one.
    varies: bool = False
    adopts: tuple[int, int] | None = None  # bounds of the batches that are taken over from a state
    # Global batches so far where they may change, each with the first step it holds for.
    batches: tuple[tuple[int, int], ...] = ()
    # ``step``, when it was committed (`time.perf_counter`), and the epoch of the step after it; one
    # object, so that another thread reads all of one step.
    latest: tuple[int, float | None, int | None] = (0, None, None)
    just_loaded: bool = False  # whether no pass has begun since a state was loaded

    @property
    def cursor(self) -> EpochCursor:
        """The committed position in the current epoch."""
        assert self.order is not None, "a cursor needs a data set"
        return EpochCursor(
            self.order.length, self.global_batch, self.order.drop_last, self.position
        )

    @property
    def now(self) -> Position:
        """What an exchange reports."""
        step, committed_s, epoch = self.latest
        return Position(step, tuple(self.stands), committed_s, epoch)

    @property
    def steps_alone(self) -> Position:
        """What an exchange reports where workers do not keep step."""
        # Their passes and epochs do not match, so that comparing them would refuse every run.
        return Position(self.step, ())

    def attach(self, order: EpochOrder) -> None:
        """Note the training loader's layout; `ConfigError` if the restored state has another."""
        saved = self.restored
        if saved is not None:
            self._check(saved, order)
            self.dealing = _left_of(saved, order)
        elif self.order == replace(order, lanes=self.order.lanes if self.order else ()):
            self._deal_anew(order)
        elif self.order is not None and self.position:
            raise ConfigError(
                f"the training loader before was left in mid-epoch, after {self.position} "
                "samples, and this one is laid out in another way, so the position would not mean "
                "the same; keep the loader and call its restart(), or make another Stride"
            )
        self.order, self.restored = order, None
        self.end = self.cursor.end
        self._roll_over()

    def _deal_anew(self, order: EpochOrder) -> None:
        """Go on in mid-epoch with another number of loader processes."""
        fresh = order.dealing(self.epoch)
        if fresh is not None and self.dealing is not None:
            self.dealing = fresh.restored(self.dealing.save())

    def begin_pass(self) -> None:
        self.untrained_pass = True

    def end_pass(self) -> None:
        """Note that the loop was left; a finished epoch makes way for the next."""
        self._roll_over()

    def commit(self, samples: int, dealing: ShardAssignment | None = None) -> None:
        """Count one step over ``samples`` samples as trained, with what is left of the shards."""
        if self.untrained_pass:
            self.stands.append((self.step, self.epoch, self.position))
            self.untrained_pass = False
        # Only a calibration goes past the end: it starts the epoch again.
        after = self.position + samples
        self.position = after if after <= self.end else samples
        self.dealing = dealing
        self.step += 1
        self.latest = self.step, time.perf_counter(), self.epoch + (self.position >= self.end)

    def keep_parts(self, parts: tuple[int, ...]) -> None:
        """Note the shares that cut the data set when the epoch began."""
        self.parts = parts

    def follow(self, position: int) -> None:
        """Stand where the servers say that training is; they give the samples out."""
        self.position = position

    def go_to_step(self, step: int) -> None:
        """Count steps on from another worker's."""
        self.step = step

    def meet(self, position: int, updates: int) -> None:
        """Stand where all do at the end of an epoch without a common step, so many updates on."""
        self.position, self.earlier = position, updates - self.step

    def next_epoch(self) -> None:
        """Leave the rest of the current epoch, unless nothing of it has been trained."""
        if self.position:
            self.epoch, self.position, self.dealing = self.epoch + 1, 0, None

    def save(self) -> dict[str, Any]:
        order = self.order
        told = self.varies or self.adopts is not None
        more = {"batches": [list(one) for one in self._batches()]} if told else {}
        if order is None and self.restored is not None:
            return {"version": POSITION_VERSION, **asdict(self.restored), **more}
        return {
            **more,
            "version": POSITION_VERSION,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
            "step": self.earlier + self.step,
            "global_batch": self.global_batch,
            "length": None if order is None else order.length,
            "shuffle": True if order is None else order.shuffle,
            "drop_last": False if order is None else order.drop_last,
            "by_epoch": False if order is None else order.by_epoch,
            "parts": list(self.parts) if self.position else [],
            "shards": "" if order is None else digest(order.shards),
            "left": None if self.dealing is None else self.dealing.save(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go to a saved position; if that is refused (`ConfigError`), nothing has changed."""
        saved = _saved_of(state)
        # By the batch that the epoch was trained with, which decides where it ends.
        ended = _has_ended(saved)
        if self.varies:
            saved = replace(saved, global_batch=self.global_batch)
        batch = self._adopted(saved.global_batch)
        for name, mine in (("seed", self.seed), ("global_batch", batch)):
            if getattr(saved, name) != mine:
                raise ConfigError(
                    f"the saved state has {name} {getattr(saved, name)}, this Stride {mine}; make "
                    "the Stride with the saved one"
                )
        before = _batches_of(state, saved)
        if self.order is not None:
            self._check(saved, self.order)
            _check_length(self.order, batch)
        if ended:
            saved = replace(saved, epoch=saved.epoch + 1, position=0, parts=(), left=None)
        self.restored = saved if self.order is None else None
        self.global_batch = batch
        self.batches = _followed(before, saved.step, batch)
        self.epoch, self.position = saved.epoch, saved.position
        self.parts = tuple(saved.parts)
        self.dealing = None if self.order is None else _left_of(saved, self.order)
        self.earlier = self.loaded = saved.step - self.step
        self.just_loaded = True
        if self.order is not None:
            self.end = self.cursor.end

    def first_since_load(self) -> bool:
        """Return whether nobody has asked since the position was loaded."""
        first, self.just_loaded = self.just_loaded, False
        return first

    def go_on_with(self, batch: int) -> None:
        """Train another global batch from here on, where an epoch ends or a pass begins."""
        self._roll_over()  # by the batch that the epoch was trained with
        self.batches = _followed(self._batches(), self.earlier + self.step, batch)
        self.global_batch = batch
        self.end = self.cursor.end

    def _adopted(self, saved: object) -> int:
        """Return the batch to go on with from a saved one; `ConfigError` if out of bounds."""
        if self.adopts is None:
            return self.global_batch
        low, high = self.adopts
        if not isinstance(saved, int) or not low <= saved <= high:
            raise ConfigError(
                f"the saved state has a global batch of {saved}, and the bounds of this Stride are "
                f"{low} to {high}; widen bounds=, or choose one with EVENSTRIDE_GLOBAL_BATCH"
            )
        return saved

    def _batches(self) -> tuple[tuple[int, int], ...]:
        return self.batches or ((0, self.global_batch),)

    def _check(self, saved: Saved, order: EpochOrder) -> None:
        if saved.length is None:  # saved before there was a loader: no position to keep
            return
        for name in ("length", "shuffle", "drop_last", "by_epoch"):
            if getattr(saved, name) != getattr(order, name):
                raise ConfigError(
                    f"the saved state belongs to a loader with {name} {getattr(saved, name)}, "
                    f"this one has {getattr(order, name)}; positions would not mean the same"
                )

        if saved.shards != digest(order.shards):
            raise ConfigError(
                "the saved state belongs to data in other shards (their number or lengths differ); "
                "restore it with the data it was saved with"
            )

    def _roll_over(self) -> None:
        if self.cursor.done and self.position:
            self.next_epoch()


def _saved_of(state: Any) -> Saved:
    """Return what a state says; `ConfigError` if it is none, or of another version."""
    if not isinstance(state, dict):
        raise ConfigError(
            f"a saved state is a dictionary, not a {type(state).__name__}; give what "
            "state_dict() returned"
        )
    if state.get("version") != POSITION_VERSION:
        raise ConfigError(
            f"the saved state has version {state.get('version')!r}, this evenstride reads "
            f"{POSITION_VERSION}; load it with the version that wrote it"
        )
    missing = [name for name in Saved.__slots__ if name not in state]
    if missing:
        raise ConfigError(
            f"the saved state lacks {', '.join(missing)}; give what state_dict() returned"
        )
    return Saved(**{name: state[name] for name in Saved.__slots__})


def _has_ended(saved: Saved) -> bool:
    """Return whether a state is of the end of an epoch, which the next one follows."""
    if saved.length is None:
        return False
    end = EpochCursor(saved.length, saved.global_batch, saved.drop_last).end
    return saved.position >= end > 0


def _check_length(order: EpochOrder, batch: int) -> None:
    """Refuse a batch of which there is none in an epoch, so that no step would ever be trained."""
    if EpochCursor(order.length, batch, order.drop_last).end == 0:
        raise ConfigError(
            f"drop_last leaves nothing: the data set has {order.length} samples, fewer than the "
            f"global batch of {batch} of the saved state; leave drop_last out, or choose a smaller "
            "batch with EVENSTRIDE_GLOBAL_BATCH"
        )


def _batches_of(state: dict[str, Any], saved: Saved) -> tuple[tuple[int, int], ...]:
    """Return the batches that a state was trained with, each with its first step."""
    told = state.get("batches") or [[0, saved.global_batch]]
    try:
        return tuple((int(first), int(samples)) for first, samples in told)
    except (TypeError, ValueError):
        raise ConfigError(
            f"the saved state has batches {str(told)[:60]!r}, which are no pairs of a step and "
            "samples; give what state_dict() returned"
        ) from None


def _followed(
    before: tuple[tuple[int, int], ...], step: int, batch: int
) -> tuple[tuple[int, int], ...]:
    """Return the batches of a run with the one that holds from a step on."""
    known = tuple(one for one in before if one[0] < step)
    return known if known and known[-1][1] == batch else (*known, (step, batch))


def _left_of(saved: Saved, order: EpochOrder) -> ShardAssignment | None:
    """Return what a saved state has left of the shards; nothing where an epoch begins."""
    fresh = order.dealing(saved.epoch)
    if fresh is None or saved.left is None or not saved.position:
        return None
    return fresh.restored(saved.left)


class BatchChanges:
    """The turns of one rank's training loop, where the batch may become another one."""

    def __init__(
        self,
        progress: CommittedPosition,
        limits: MicroBatchLimits,
        clock: RankClock,
        noise: NoiseMeter | None,
        meet: Callable[[BatchChange], int | None],  # waits for all; ``None``: no more decisions
    ) -> None:
        self._progress, self._limits, self._clock = progress, limits, clock
        self._noise, self._meet = noise, meet
        self._in_force = progress.global_batch

    def before_pass(self) -> None:
        """Let a batch that was restored be taken up by all."""
        wanted = self._progress.global_batch
        # A rank that did not restore it is found by the step that it draws.
        if wanted != self._in_force:
            self._turn(wanted)

    def after_pass(self) -> None:
        """Have the next epoch's batch chosen, if the epoch has ended."""
        if self._progress.order is not None and self._progress.cursor.done:
            self._turn(None)

    def _turn(self, wanted: int | None) -> None:
        progress, timer = self._progress, self._clock.timer
        assert progress.order is not None, "there is a loader, so there is an order"
        timer.settle()  # so that the steps before it are measured
        weighted = self._noise is not None and self._noise.weighted
        with timer.turning():
            batch = self._meet(BatchChange(progress.step, wanted, progress.order.length, weighted))
        if batch is None or batch == self._in_force:
            return
        progress.go_on_with(batch)
        self._in_force = batch
        tail = 0 if progress.order.drop_last else progress.order.length % batch
        self._limits.change_tail(tail)
