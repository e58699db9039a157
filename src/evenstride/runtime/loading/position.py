"""The layout of epochs, the committed position in the data, and changes of the global batch.

A global batch may change only between two epochs. So the samples of each step follow from the
position in the data alone. Every rank waits there until all have reported it to the leader in the
same exchange. No rank has drawn the next step then, however far its loader prefetches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from evenstride.core.fleet import Shares
from evenstride.core.sampling.draw import ShardAssignment
from evenstride.core.sampling.partition import UNKNOWN_LENGTH, EpochCursor
from evenstride.errors import ConfigError
from evenstride.runtime.coordination.draw_barrier import BatchChange, Position
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits
from evenstride.runtime.loading.shards import digest
from evenstride.runtime.loading.streams import WINDOWS
from evenstride.runtime.noise.noise_meter import NoiseMeter
from evenstride.runtime.timing.device_timer import RankClock

# Version 1 had another sample order, and version 2 cut parts from the data set's order.
POSITION_VERSION = 3
_STANDS = 8


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The layout of an epoch, equal on all ranks."""

    length: int  # samples in the data set
    seed: int  # for the order and the samples' randomness
    shuffle: bool = True  # ``False`` keeps the order of the data set.
    drop_last: bool = False  # leave out the last, incomplete global batch
    by_epoch: bool = False  # each worker keeps one part of the data set for a whole epoch
    shards: Shares = ()  # samples in each shard, for a sequential data set.
    lanes: tuple[int, ...] = ()  # shards that each worker reads in turn
    windows: str = ""  # ``stream`` or ``function`` if each rank reads whole global batches
    unlimited: bool = False  # whether the length of an epoch is unknown before its end

    @property
    def fingerprint(self) -> str:
        """What a saved position depends on, besides the length; empty for an indexed data set."""
        return self.windows or digest(self.shards)

    def dropped(self, batch: int) -> int:
        """Return how many samples ``drop_last`` leaves out of every epoch, as far as is known."""
        return self.length % batch if self.drop_last and not self.unlimited else 0

    def dealing(self, epoch: int) -> ShardAssignment | None:
        """Return how an epoch of shards begins; ``None`` for other data."""
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
    parts_end: int
    shards: str
    left: dict[str, Any] | None


@dataclass(slots=True)
class CommittedPosition:
    """The committed position of one rank."""

    seed: int
    global_batch: int
    epoch: int = 0
    step: int = 0  # committed by this process; it never decreases.
    # Steps committed earlier, in the run whose state was loaded. Without a common step it also
    # includes the other workers' steps since then, once an epoch has ended.
    earlier: int = 0
    loaded: int = 0  # of ``earlier``, those of the loaded state
    position: int = 0  # samples committed in the current epoch
    order: EpochOrder | None = None  # once there is a loader
    end: int = 0  # samples of an epoch that are trained.
    # Whether nothing has been trained yet in the current pass. A pass that ends so (because the
    # script only inspects the data, say) is not reported to other ranks.
    untrained_pass: bool = True
    # For exchanges: (step, epoch, position) at which the latest passes with training began.
    stands: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=_STANDS))
    # The loaded state, until a loader has been checked against it.
    restored: Saved | None = None
    parts: tuple[int, ...] = ()  # shares that split the data set at the start of this epoch
    # Position in this epoch from which other ranks train what the parts have left; 0 for none.
    parts_end: int = 0
    dealing: ShardAssignment | None = None  # the rest of the shards in the current epoch.
    # Whether a state with another global batch may be loaded; training then keeps its own.
    varies: bool = False
    adopts: tuple[int, int] | None = None  # bounds of global batches taken over from a state.
    # Global batches so far if they may change, each with its first step.
    batches: tuple[tuple[int, int], ...] = ()
    # ``step``, the time of its commit (`time.perf_counter`), and its epoch; one object, so that
    # another thread reads values of the same step.
    latest: tuple[int, float | None, int | None] = (0, None, None)
    just_loaded: bool = False  # whether no pass has begun since a state was loaded
    found: int = 0  # samples of the latest epoch whose length was unknown before its end
    limit: int | None = None  # step of this process before which the loader's loop ends

    @property
    def cursor(self) -> EpochCursor:
        """The committed position in the current epoch."""
        assert self.order is not None, "a cursor needs a data set"
        return EpochCursor(
            self.order.length, self.global_batch, self.order.drop_last, self.position
        )

    @property
    def usual_end(self) -> int:
        """Samples of this epoch; while that is unknown, those of the latest epoch, if any."""
        unknown = self.order is not None and self.order.length == UNKNOWN_LENGTH
        return max(self.found, self.position) if unknown and self.found else self.end

    @property
    def now(self) -> Position:
        """What an exchange reports."""
        step, committed_s, epoch = self.latest
        return Position(
            step, tuple(self.stands), committed_s, self.epoch if epoch is None else epoch
        )

    @property
    def steps_alone(self) -> Position:
        """What an exchange reports without a common step."""
        # Passes and epochs differ between workers, so comparing them would refuse every run.
        return Position(self.step, (), epoch=self.epoch)

    def attach(self, order: EpochOrder) -> None:
        """Note the training loader's layout; raise `ConfigError` if the loaded state differs."""
        saved = self.restored
        if saved is not None:
            self._check(saved, order)
            self.dealing = _left_of(saved, order)
        elif self.order == replace(order, lanes=self.order.lanes if self.order else ()):
            self._restore_shards(order)
        elif self.order is not None and self.position:
            raise ConfigError(
                f"the previous training loader stopped within an epoch, after {self.position} "
                "samples, and this one has another layout, so the position would have another "
                "meaning; keep the loader and call its restart(), or create another Stride"
            )
        self.order, self.restored = order, None
        self.end = self.cursor.end
        self._roll_over()

    def _restore_shards(self, order: EpochOrder) -> None:
        """Continue within an epoch with another number of loader processes."""
        fresh = order.dealing(self.epoch)
        if fresh is not None and self.dealing is not None:
            self.dealing = fresh.restored(self.dealing.save())

    def begin_pass(self, max_steps: int | None = None) -> None:
        """Note the start of a pass, and the steps of all runs together after which it ends."""
        self.untrained_pass = True
        self.limit = None if max_steps is None else max(max_steps - self.earlier, self.step)

    def end_pass(self) -> None:
        """Note that the loop has ended; after a finished epoch the next one begins."""
        self._roll_over()

    def commit(self, samples: int, dealing: ShardAssignment | None = None) -> None:
        """Count one step of ``samples`` samples as trained, and note the rest of the shards."""
        if self.untrained_pass:
            self.stands.append((self.step, self.epoch, self.position))
            self.untrained_pass = False
        # Only a calibration passes the end: it starts the epoch again.
        after = self.position + samples
        self.position = after if after <= self.end else samples
        self.dealing = dealing
        self.step += 1
        self.latest = self.step, time.perf_counter(), self.epoch

    def found_end(self, end: int) -> None:
        """Note the length of an epoch whose end was just found."""
        assert self.order is not None, "a stream is read by a loader"
        self.order = replace(self.order, length=end)
        self.found = self.end = self.cursor.end
        if not self.end:
            raise ConfigError(
                f"the stream has {end} samples, so no step of an epoch is possible; check the "
                "source of the stream, or leave drop_last out"
            )

    def keep_parts(self, parts: tuple[int, ...], parts_end: int) -> None:
        """Note the shares that split the data set at the start of the epoch, and up to where."""
        self.parts, self.parts_end = parts, parts_end

    def follow(self, position: int) -> None:
        """Take the position that the servers report, which distribute the samples."""
        self.position = position

    def go_to_step(self, step: int) -> None:
        """Continue the step count of another worker."""
        self.step = step

    def meet(self, position: int, updates: int) -> None:
        """Take the common position at the end of an epoch without a common step."""
        self.position, self.earlier = position, updates - self.step

    def next_epoch(self) -> None:
        """Skip the rest of the current epoch, unless nothing of it has been trained."""
        if self.position:
            self.epoch, self.position, self.dealing = self.epoch + 1, 0, None
            self._forget_end()

    def save(self) -> dict[str, Any]:
        order = self.order
        changes = self.varies or self.adopts is not None
        more = {"batches": [list(one) for one in self._batches()]} if changes else {}
        if order is None and self.restored is not None:
            return {"version": POSITION_VERSION, **asdict(self.restored), **more}
        unlimited = order is not None and order.unlimited
        # Another epoch may have another length, so none is saved.
        ended = unlimited and self.cursor.done
        return {
            **more,
            "version": POSITION_VERSION,
            "seed": self.seed,
            "epoch": self.epoch + ended,
            "position": 0 if ended else self.position,
            "step": self.earlier + self.step,
            "global_batch": self.global_batch,
            "length": UNKNOWN_LENGTH if unlimited else None if order is None else order.length,
            "shuffle": True if order is None else order.shuffle,
            "drop_last": False if order is None else order.drop_last,
            "by_epoch": False if order is None else order.by_epoch,
            "parts": list(self.parts) if self.position else [],
            "parts_end": self.parts_end if self.position else 0,
            "shards": "" if order is None else order.fingerprint,
            "left": None if self.dealing is None else self.dealing.save(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go to a saved position; a `ConfigError` leaves everything unchanged."""
        saved = _saved_of(state)
        # By the global batch that the epoch was trained with, which decides where it ends.
        ended = _has_ended(saved)
        if self.varies:
            saved = replace(saved, global_batch=self.global_batch)
        batch = self._adopted(saved.global_batch)
        for name, mine in (("seed", self.seed), ("global_batch", batch)):
            if getattr(saved, name) != mine:
                raise ConfigError(
                    f"the saved state has {name} {getattr(saved, name)}, but this Stride has "
                    f"{mine}; create the Stride with the saved value"
                )
        before = _batches_of(state, saved)
        if self.order is not None:
            self._check(saved, self.order)
            _check_length(self.order, batch)
        if ended:
            saved = replace(
                saved, epoch=saved.epoch + 1, position=0, parts=(), parts_end=0, left=None
            )
        if sum(saved.parts) not in (0, batch) and not saved.parts_end:
            # Steps of another size do not fit into the parts.
            saved = replace(saved, parts_end=saved.position)
        self.restored = saved if self.order is None else None
        self._forget_end()
        self.global_batch = batch
        self.batches = _followed(before, saved.step, batch)
        self.epoch, self.position = saved.epoch, saved.position
        self.keep_parts(tuple(saved.parts), saved.parts_end)
        self.dealing = None if self.order is None else _left_of(saved, self.order)
        self.earlier = self.loaded = saved.step - self.step
        self.just_loaded = True
        if self.order is not None:
            self.end = self.cursor.end

    def first_since_load(self) -> bool:
        """Return whether this is the first call since the position was loaded."""
        first, self.just_loaded = self.just_loaded, False
        return first

    def go_on_with(self, batch: int) -> None:
        """Use another global batch from here on, between two epochs or before a pass."""
        self._roll_over()  # by the global batch that the epoch was trained with
        self.batches = _followed(self._batches(), self.earlier + self.step, batch)
        self.global_batch = batch
        self.end = self.cursor.end

    def _adopted(self, saved: object) -> int:
        """Return the global batch to continue with; `ConfigError` if it is out of bounds."""
        if self.adopts is None:
            return self.global_batch
        low, high = self.adopts
        if not isinstance(saved, int) or not low <= saved <= high:
            raise ConfigError(
                f"the saved state has a global batch of {saved}, but the bounds of this Stride are "
                f"{low} to {high}; widen bounds=, or set EVENSTRIDE_GLOBAL_BATCH"
            )
        return saved

    def _batches(self) -> tuple[tuple[int, int], ...]:
        return self.batches or ((0, self.global_batch),)

    def _check(self, saved: Saved, order: EpochOrder) -> None:
        if saved.length is None:  # saved before there was a loader, so it has no position
            return
        kind = saved.shards if saved.shards in WINDOWS else ""
        if kind != order.windows:
            raise ConfigError(
                f"the saved state belongs to a {kind or 'data set'}, but this loader has a "
                f"{order.windows or 'data set'}; restore it with the data it was saved with"
            )
        within_epoch = ("by_epoch",) if saved.position and not _has_ended(saved) else ()
        for name in ("length", "shuffle", "drop_last", *within_epoch):
            if getattr(saved, name) != getattr(order, name):
                raise ConfigError(
                    f"the saved state belongs to a loader with {name} {getattr(saved, name)}, but "
                    f"this one has {getattr(order, name)}, so positions would have another "
                    "meaning; create the loader with the saved value"
                )

        if saved.shards != order.fingerprint:
            raise ConfigError(
                "the saved state belongs to data in other shards (their number or lengths differ); "
                "restore it with the data it was saved with"
            )

    def _forget_end(self) -> None:
        """Forget the length of an epoch, unless all epochs have that length."""
        if self.order is not None and self.order.unlimited:
            self.order = replace(self.order, length=UNKNOWN_LENGTH)
            self.end = self.cursor.end

    def _roll_over(self) -> None:
        if self.cursor.done and self.position:
            self.next_epoch()


def _saved_of(state: Any) -> Saved:
    """Return the contents of a state; raise `ConfigError` if it is malformed or outdated."""
    if not isinstance(state, dict):
        raise ConfigError(
            f"a saved state is a dictionary, not a {type(state).__name__}; pass what state_dict() "
            "returned"
        )
    if state.get("version") != POSITION_VERSION:
        raise ConfigError(
            f"the saved state has version {state.get('version')!r}, but this evenstride reads "
            f"version {POSITION_VERSION}; load it with the evenstride that wrote it"
        )
    missing = [name for name in Saved.__slots__ if name not in state]
    if missing:
        raise ConfigError(
            f"the saved state lacks {', '.join(missing)}; pass what state_dict() returned"
        )
    return Saved(**{name: state[name] for name in Saved.__slots__})


def _has_ended(saved: Saved) -> bool:
    """Return whether a state is at the end of an epoch, so that the next one follows."""
    if saved.length is None:
        return False
    end = EpochCursor(saved.length, saved.global_batch, saved.drop_last).end
    return saved.position >= end > 0


def _check_length(order: EpochOrder, batch: int) -> None:
    """Refuse a global batch that does not fit into an epoch: no step would ever be trained."""
    if EpochCursor(order.length, batch, order.drop_last).end == 0:
        raise ConfigError(
            f"drop_last leaves no batch: the data set has {order.length} samples, fewer than the "
            f"global batch of {batch} of the saved state; leave drop_last out, or set a smaller "
            "batch with EVENSTRIDE_GLOBAL_BATCH"
        )


def _batches_of(state: dict[str, Any], saved: Saved) -> tuple[tuple[int, int], ...]:
    batches = state.get("batches") or [[0, saved.global_batch]]
    try:
        return tuple((int(first), int(samples)) for first, samples in batches)
    except (TypeError, ValueError):
        raise ConfigError(
            f"the saved state has batches {str(batches)[:60]!r}; expected pairs of a step and a "
            "number of samples; pass what state_dict() returned"
        ) from None


def _followed(
    before: tuple[tuple[int, int], ...], step: int, batch: int
) -> tuple[tuple[int, int], ...]:
    """Return the global batches of a run, with the one that holds from a step on."""
    known = tuple(one for one in before if one[0] < step)
    return known if known and known[-1][1] == batch else (*known, (step, batch))


def _left_of(saved: Saved, order: EpochOrder) -> ShardAssignment | None:
    fresh = order.dealing(saved.epoch)
    if fresh is None or saved.left is None or not saved.position:
        return None
    return fresh.restored(saved.left)


class BatchChanges:
    """The points of one rank's training loop at which all ranks meet, at the end of an epoch.

    There the global batch may change, and policies that decide once per epoch do so.
    """

    def __init__(
        self,
        progress: CommittedPosition,
        limits: MicroBatchLimits,
        clock: RankClock,
        noise: NoiseMeter | None,
        meet: Callable[[BatchChange], int | None],  # waits for all ranks; ``None``: no decisions
        *,
        chosen: bool,  # whether a batch is chosen there
    ) -> None:
        self._progress, self._limits, self._clock = progress, limits, clock
        self._noise, self._meet, self._chosen = noise, meet, chosen
        self._in_force = progress.global_batch
        self._epoch: int | None = None  # that the ranks have met for

    def before_pass(self) -> None:
        """Make all ranks take over a restored global batch, or meet if they have not."""
        wanted, epoch = self._progress.global_batch, self._progress.epoch
        # A rank that did not restore it is detected by the step that it draws.
        if wanted != self._in_force:
            self._turn(wanted)
        elif self._epoch is not None and self._epoch < epoch and not self._chosen:
            # The last loop was left by `break`. After that, a script may have used the batch for
            # the next epoch, so no other one is chosen.
            self._turn(None)
        self._epoch = epoch

    def after_pass(self) -> None:
        """Let the next epoch's global batch and shares be chosen, if the epoch has ended."""
        if self._progress.order is not None and self._progress.cursor.done:
            self._turn(None)
            self._epoch = self._progress.epoch + 1

    def _turn(self, wanted: int | None) -> None:
        progress, timer = self._progress, self._clock.timer
        assert progress.order is not None, "with a loader there is an order"
        timer.settle()  # so that the steps before the change are measured
        weighted = self._noise is not None and self._noise.weighted
        with timer.turning():
            batch = self._meet(BatchChange(progress.step, wanted, progress.order.length, weighted))
        if batch is None or batch == self._in_force:
            return
        progress.go_on_with(batch)
        self._in_force = batch
        tail = 0 if progress.order.drop_last else progress.order.length % batch
        self._limits.change_tail(tail)
