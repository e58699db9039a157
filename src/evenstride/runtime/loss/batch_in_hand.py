"""The current batch of the training loop, and its state.

A batch is one micro-batch of a step. It is drawn, its loss is scaled, and its backward pass runs.
The last one of the step is synchronised between the ranks, and the optimizer steps. A batch
without samples (a share of 0) goes through the same states, because the other ranks need its
collectives. `TRANSITIONS` defines all changes of state; `BatchInHand` receives the events.
"""

from __future__ import annotations

import logging
from enum import Enum, IntEnum, auto

from evenstride.core.sampling.draw import Draw
from evenstride.errors import UsageError
from evenstride.runtime import usage_errors
from evenstride.runtime.engines.watched_models import WatchedModels

logger = logging.getLogger("evenstride")


# Integers, because every step looks up several transitions: C code computes their hash.
class StepState(IntEnum):
    """The state of the current batch."""

    NO_BATCH = auto()
    """The training loop has no batch: it has not begun, has ended or stopped early."""
    DRAWN = auto()
    """The loop has the batch."""
    SCALED = auto()
    """A loss of the batch was scaled."""
    IN_BACKWARD = auto()
    """A backward pass has begun and not ended."""
    BACKWARD = auto()
    """This rank's gradients of the batch are complete."""
    SYNCHRONISED = auto()
    """The gradients are averaged over the ranks, which commits the step."""
    STEPPED = auto()
    """The optimizer has stepped."""
    SKIPPED = auto()
    """A gradient scaler has skipped the optimizer's step, because of infinite or NaN gradients."""
    UNSCALED = auto()
    """The optimizer has synchronised and stepped before a loss of the batch was scaled."""
    UNTRAINED = auto()
    """Like `UNSCALED` with a loss scaled since, but no backward pass of the batch has ended."""
    RETRY = auto()
    """The batch did not fit into memory and comes again."""
    LEFT_UNSTEPPED = auto()
    """The loop stopped after a committed step whose optimizer has not stepped."""


class StepEvent(IntEnum):
    DRAW = auto()
    SCALE = auto()
    BACKWARD_BEGINS = auto()
    GRADIENTS_READY = auto()
    SYNCHRONISE = auto()
    OPTIMIZER_STEPS = auto()
    SCALER_UPDATES = auto()
    """Of a gradient scaler, after each step that the optimizer took or the scaler skipped."""
    LOOP_ENDS = auto()
    """The loop has finished its last step."""
    OUT_OF_MEMORY = auto()
    """The batch must come again."""
    LEAVE = auto()
    """The loop stops, and the batch is forgotten."""


_S, _E = StepState, StepEvent
_EARLY = (_S.UNSCALED, _S.UNTRAINED)
# Tuples: with so few states, `in` is faster than in a set.
COMMITTED = (_S.SYNCHRONISED, _S.STEPPED, _S.SKIPPED, *_EARLY)
UNSTEPPED = (_S.SYNCHRONISED, _S.LEFT_UNSTEPPED)
BACKWARD_BEGAN = (_S.IN_BACKWARD, _S.BACKWARD, _S.SYNCHRONISED, _S.STEPPED, _S.SKIPPED)

TRANSITIONS: dict[tuple[StepState, StepEvent], StepState] = {
    (_S.NO_BATCH, _E.DRAW): _S.DRAWN,
    (_S.DRAWN, _E.SCALE): _S.SCALED,
    (_S.SCALED, _E.SCALE): _S.SCALED,  # another loss of the batch
    # The previous pass raised, so its callback never ran.
    (_S.IN_BACKWARD, _E.SCALE): _S.SCALED,
    (_S.BACKWARD, _E.SCALE): _S.BACKWARD,
    # The graph may hold the hook of a loss that was scaled for an earlier batch.
    (_S.DRAWN, _E.BACKWARD_BEGINS): _S.IN_BACKWARD,
    (_S.SCALED, _E.BACKWARD_BEGINS): _S.IN_BACKWARD,
    (_S.BACKWARD, _E.BACKWARD_BEGINS): _S.BACKWARD,
    (_S.IN_BACKWARD, _E.GRADIENTS_READY): _S.BACKWARD,
    (_S.BACKWARD, _E.GRADIENTS_READY): _S.BACKWARD,
    # A checkpointed loss is scaled again when its own backward pass recomputes it.
    (_S.SCALED, _E.GRADIENTS_READY): _S.BACKWARD,
    (_S.BACKWARD, _E.SYNCHRONISE): _S.SYNCHRONISED,
    # If the optimizer's step synchronises, a loop can call it before the backward pass, with the
    # previous batch's gradients. Without a backward pass after it, the next fetch is refused.
    (_S.DRAWN, _E.SYNCHRONISE): _S.UNSCALED,
    (_S.SCALED, _E.SYNCHRONISE): _S.UNTRAINED,
    (_S.IN_BACKWARD, _E.SYNCHRONISE): _S.UNTRAINED,
    (_S.SYNCHRONISED, _E.OPTIMIZER_STEPS): _S.STEPPED,
    (_S.SYNCHRONISED, _E.SCALER_UPDATES): _S.SKIPPED,
    (_S.SYNCHRONISED, _E.LOOP_ENDS): _S.STEPPED,
    # A scaler may skip the steps of some of several optimizers.
    (_S.SKIPPED, _E.OPTIMIZER_STEPS): _S.STEPPED,
    # The next batch after a micro-batch that is not the last, and after each committed one.
    (_S.BACKWARD, _E.DRAW): _S.DRAWN,
    **{(state, _E.DRAW): _S.DRAWN for state in COMMITTED},
    # A committed step stays committed: another loss of the batch may follow, or another optimizer.
    **{
        (state, event): state
        for state in COMMITTED
        for event in (_E.SCALE, _E.BACKWARD_BEGINS, _E.GRADIENTS_READY, _E.SYNCHRONISE)
    },
    (_S.UNSCALED, _E.SCALE): _S.UNTRAINED,
    **{(state, _E.GRADIENTS_READY): _S.STEPPED for state in _EARLY},
    **{(_S.STEPPED, event): _S.STEPPED for event in (_E.OPTIMIZER_STEPS, _E.SCALER_UPDATES)},
    (_S.SKIPPED, _E.SCALER_UPDATES): _S.SKIPPED,
    # Once committed, a batch cannot come again: other ranks have its gradients.
    **{
        (state, _E.OUT_OF_MEMORY): _S.RETRY
        for state in (_S.DRAWN, _S.SCALED, _S.IN_BACKWARD, _S.BACKWARD)
    },
    # Callbacks of the failed pass may still arrive.
    **{(_S.RETRY, event): _S.RETRY for event in (_E.BACKWARD_BEGINS, _E.GRADIENTS_READY)},
    (_S.RETRY, _E.DRAW): _S.DRAWN,
    **{(state, _E.LEAVE): _S.NO_BATCH for state in _S},
    # The position is past this step but the weights are not, so a state must not be saved yet.
    **{(state, _E.LEAVE): _S.LEFT_UNSTEPPED for state in UNSTEPPED},
    (_S.LEFT_UNSTEPPED, _E.DRAW): _S.DRAWN,
    # An optimizer of unwatched parameters may step at any time; a loop may end anywhere.
    **{
        (state, event): state
        for state in (*(set(_S) - set(COMMITTED)), *_EARLY)
        for event in (_E.OPTIMIZER_STEPS, _E.SCALER_UPDATES)
    },
    (_S.LEFT_UNSTEPPED, _E.OPTIMIZER_STEPS): _S.NO_BATCH,
    (_S.LEFT_UNSTEPPED, _E.SCALER_UPDATES): _S.NO_BATCH,
    **{(state, _E.LOOP_ENDS): state for state in set(_S) - {_S.SYNCHRONISED}},
}
"""The next state for each state and event; any other combination is an error."""


def after(state: StepState, event: StepEvent) -> StepState:
    """Return the next state; raise `UsageError` if the event is not possible in this state.

    >>> after(StepState.BACKWARD, StepEvent.SYNCHRONISE).name
    'SYNCHRONISED'
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise UsageError(
            f"{event.name.lower()} happened while the current batch was in state "
            f"{state.name.lower()}, which no training loop should cause; please report it with the "
            "code of the loop"
        ) from None


class Retry(Enum):
    """What comes again because a batch did not fit into memory."""

    NO = 0
    BATCH = 1
    STEP = 2

    def __bool__(self) -> bool:
        return self is not Retry.NO


class BatchInHand:
    """The current batch of the loop and its state; only its methods change it."""

    def __init__(self, watched: WatchedModels) -> None:
        self._watched = watched
        self._state = StepState.NO_BATCH
        self._largest = 0
        self._samples_read = False  # whether the script has ever read `samples`
        self.draw: Draw | None = None
        """Its step and samples; ``None`` outside the loop."""
        self.weight: float | None = None
        """Result of the loader's weight function, if there is one."""
        self.retry = Retry.NO
        """What comes again because it did not fit into memory."""
        self.clean = False
        """Whether there were no gradients when its step began."""

    @property
    def committed(self) -> bool:
        return self._state in COMMITTED

    @property
    def backward_began(self) -> bool:
        """Whether a backward pass of it has begun, finished or not."""
        return self._state in BACKWARD_BEGAN

    @property
    def failed(self) -> bool:
        """Whether a backward pass began to synchronise the step but never finished."""
        draw = self.draw
        return draw is not None and draw.last and self._state is StepState.BACKWARD

    @property
    def mid_step(self) -> bool:
        """Whether some, but not all, backward passes of the current step have run."""
        if self.draw is None or self.committed:
            return False
        return self._state is StepState.BACKWARD or not self.draw.first

    @property
    def unstepped(self) -> bool:
        """Whether its step is committed, but no optimizer step has been seen."""
        if self._state not in UNSTEPPED:
            return False
        # A gradient scaler that skips a step never calls the optimizer, and some scripts update
        # the weights by hand. Gradients that are gone show that such a step is over. The models
        # are read each time, because a script may have replaced parameters.
        gradients = [p.grad for model in self._watched.models for p in model.parameters()]
        return not self._watched.models or any(g is not None and bool(g.any()) for g in gradients)

    @property
    def synced(self) -> bool:
        """Whether it is the last of its step, so that the optimizer must step."""
        return self.draw is None or (self.draw.last and not self.retry)

    @property
    def samples(self) -> int:
        """Number of its samples, 0 for a placeholder."""
        return 0 if self.draw is None or self.retry else self.draw.samples

    def read_samples(self) -> int:
        """Return `samples` to the script, and note that the script reads it."""
        self._samples_read = True
        return self.samples

    def warn_of_placeholder(self) -> None:
        """Warn once if a placeholder was trained and the script never reads `samples`."""
        draw = self.draw
        if draw is not None and not draw.samples and not self._samples_read:
            self._samples_read = True
            usage_errors.tell_of_placeholder(draw.step)

    def largest(self) -> int:
        """Return the samples of the largest batch since the last call (any thread)."""
        draw, largest = self.draw, self._largest
        # The current batch may reach its peak after this call, so it counts again.
        self._largest = 0 if draw is None else draw.samples
        return largest

    def happened(self, event: StepEvent) -> None:
        self._state = after(self._state, event)

    def begin(self, draw: Draw, weight: float | None) -> None:
        self.draw, self.weight, self.retry = draw, weight, Retry.NO
        if draw.samples > self._largest:
            self._largest = draw.samples
        self._state = after(self._state, StepEvent.DRAW)
        if draw.first and not draw.last:
            # After its backward pass began, only a micro-batch before the last can be repeated.
            self.clean = self._watched.without_gradients

    def give_up(self, what: Retry) -> None:
        self._state = after(self._state, StepEvent.OUT_OF_MEMORY)
        self.retry = what

    def leave(self) -> None:
        if self.mid_step and not self.failed:
            logger.warning(
                "the loop stopped between two micro-batches of step %d. The whole step will be "
                "drawn again, so call optimizer.zero_grad() first",
                self.draw.step if self.draw else 0,
            )
        self._state = after(self._state, StepEvent.LEAVE)
        self.draw, self.retry = None, Retry.NO

    def check_finished(self) -> None:
        """Raise `ScaleError` unless a loss of the batch was scaled and its backward pass ran."""
        if self.draw is None:
            return
        if self._state in (StepState.DRAWN, StepState.UNSCALED):
            raise usage_errors.unscaled(self.draw.step)
        if self._state in (StepState.SCALED, StepState.IN_BACKWARD, StepState.UNTRAINED):
            raise usage_errors.no_backward(self.draw.step)

    def refuse_after_failure(self) -> None:
        """Raise `UsageError` if the batch did not fit into memory and will come again."""
        if self.retry:
            raise UsageError(
                "the current batch did not fit into memory and comes again, so it cannot be used "
                "any further; put all of its passes into one `with stride.guard():`"
            )
