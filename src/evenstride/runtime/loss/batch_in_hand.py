"""The batch that the training loop has in its hands, and how far it has come.

A batch is one micro-batch of a step. It is drawn, its loss is scaled, its backward pass runs, and
the last one of the step is synchronised between the ranks and stepped by the optimizer. A batch
without samples (a share of 0) goes through the same states, because the other ranks need its
collectives. `TRANSITIONS` is the whole of it; `BatchInHand` hears of the events.
"""

from __future__ import annotations

import logging
from enum import Enum, IntEnum, auto

from evenstride.core.sampling.draw import Draw
from evenstride.errors import UsageError
from evenstride.runtime import usage_errors
from evenstride.runtime.engines.watched_models import WatchedModels

logger = logging.getLogger("evenstride")


# Integers, because every step looks several transitions up: their hash is computed in C.
class StepState(IntEnum):
    """Where the batch in hand stands."""

    NO_BATCH = auto()
    """The training loop has no batch: it has not begun, has ended or was left."""
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
    """A gradient scaler has left the optimizer's step out, because of infinite gradients."""
    UNSCALED = auto()
    """The optimizer has synchronised and stepped before a loss of the batch was scaled."""
    UNTRAINED = auto()
    """The same, and a loss has been scaled, but no backward pass of the batch has ended."""
    RETRY = auto()
    """The batch did not fit into memory and comes again."""
    LEFT_UNSTEPPED = auto()
    """The loop was left with a committed step whose optimizer has not stepped."""


class StepEvent(IntEnum):
    DRAW = auto()
    SCALE = auto()
    BACKWARD_BEGINS = auto()
    GRADIENTS_READY = auto()
    SYNCHRONISE = auto()
    OPTIMIZER_STEPS = auto()
    SCALER_UPDATES = auto()
    """Of a gradient scaler, after each step that the optimizer took or was kept from."""
    LOOP_ENDS = auto()
    """All that the loop does in its last step is done."""
    OUT_OF_MEMORY = auto()
    """The batch is to come again."""
    LEAVE = auto()
    """The loop is left, and the batch forgotten."""


_S, _E = StepState, StepEvent
_EARLY = (_S.UNSCALED, _S.UNTRAINED)
# As tuples: with so few states, `in` is quicker than in a set.
COMMITTED = (_S.SYNCHRONISED, _S.STEPPED, _S.SKIPPED, *_EARLY)
UNSTEPPED = (_S.SYNCHRONISED, _S.LEFT_UNSTEPPED)
BACKWARD_BEGAN = (_S.IN_BACKWARD, _S.BACKWARD, _S.SYNCHRONISED, _S.STEPPED, _S.SKIPPED)

TRANSITIONS: dict[tuple[StepState, StepEvent], StepState] = {
    (_S.NO_BATCH, _E.DRAW): _S.DRAWN,
    (_S.DRAWN, _E.SCALE): _S.SCALED,
    (_S.SCALED, _E.SCALE): _S.SCALED,  # another loss of the batch
    # The pass before raised, so its callback never came.
    (_S.IN_BACKWARD, _E.SCALE): _S.SCALED,
    (_S.BACKWARD, _E.SCALE): _S.BACKWARD,
    # The graph may hold the hook of a loss that was scaled for an earlier batch.
    (_S.DRAWN, _E.BACKWARD_BEGINS): _S.IN_BACKWARD,
    (_S.SCALED, _E.BACKWARD_BEGINS): _S.IN_BACKWARD,
    (_S.BACKWARD, _E.BACKWARD_BEGINS): _S.BACKWARD,
    (_S.IN_BACKWARD, _E.GRADIENTS_READY): _S.BACKWARD,
    (_S.BACKWARD, _E.GRADIENTS_READY): _S.BACKWARD,
    # A checkpointed loss is scaled again where its own backward pass recomputes it.
    (_S.SCALED, _E.GRADIENTS_READY): _S.BACKWARD,
    (_S.BACKWARD, _E.SYNCHRONISE): _S.SYNCHRONISED,
    # Where the optimizer's step synchronises, a loop can call it before the backward pass, with the
    # gradients of the batch before. If no backward pass follows, the next fetch is refused.
    (_S.DRAWN, _E.SYNCHRONISE): _S.UNSCALED,
    (_S.SCALED, _E.SYNCHRONISE): _S.UNTRAINED,
    (_S.IN_BACKWARD, _E.SYNCHRONISE): _S.UNTRAINED,
    (_S.SYNCHRONISED, _E.OPTIMIZER_STEPS): _S.STEPPED,
    (_S.SYNCHRONISED, _E.SCALER_UPDATES): _S.SKIPPED,
    (_S.SYNCHRONISED, _E.LOOP_ENDS): _S.STEPPED,
    # Of several optimizers, a scaler may keep some from stepping.
    (_S.SKIPPED, _E.OPTIMIZER_STEPS): _S.STEPPED,
    # The step after a micro-batch that is not its last, and after each that was committed.
    (_S.BACKWARD, _E.DRAW): _S.DRAWN,
    **{(state, _E.DRAW): _S.DRAWN for state in COMMITTED},
    # A committed step stays so: a second loss of the batch may follow, or a second optimizer.
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
    # Callbacks of the pass that failed may still arrive.
    **{(_S.RETRY, event): _S.RETRY for event in (_E.BACKWARD_BEGINS, _E.GRADIENTS_READY)},
    (_S.RETRY, _E.DRAW): _S.DRAWN,
    **{(state, _E.LEAVE): _S.NO_BATCH for state in _S},
    # The position is past this step and the weights are not, so a state must not be saved yet.
    **{(state, _E.LEAVE): _S.LEFT_UNSTEPPED for state in UNSTEPPED},
    (_S.LEFT_UNSTEPPED, _E.DRAW): _S.DRAWN,
    # An optimizer of parameters that are not ours may step at any time; a loop may end anywhere.
    **{
        (state, event): state
        for state in (*(set(_S) - set(COMMITTED)), *_EARLY)
        for event in (_E.OPTIMIZER_STEPS, _E.SCALER_UPDATES)
    },
    (_S.LEFT_UNSTEPPED, _E.OPTIMIZER_STEPS): _S.NO_BATCH,
    (_S.LEFT_UNSTEPPED, _E.SCALER_UPDATES): _S.NO_BATCH,
    **{(state, _E.LOOP_ENDS): state for state in set(_S) - {_S.SYNCHRONISED}},
}
"""The state that follows each state by an event; what is not here is an error."""


def after(state: StepState, event: StepEvent) -> StepState:
    """Return the state that follows; `UsageError` if the event cannot happen in this state.

    >>> after(StepState.BACKWARD, StepEvent.SYNCHRONISE).name
    'SYNCHRONISED'
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise UsageError(
            f"{event.name.lower()} came while the batch in hand was in state "
            f"{state.name.lower()}, which a training loop never does; please report it with the "
            "loop's code"
        ) from None


class Retry(Enum):
    """What comes again because a batch did not fit into memory."""

    NO = 0
    BATCH = 1
    STEP = 2

    def __bool__(self) -> bool:
        return self is not Retry.NO


class BatchInHand:
    """The batch in the loop's hands, and how far it has come; only its methods change it."""

    def __init__(self, watched: WatchedModels) -> None:
        self._watched = watched
        self._state = StepState.NO_BATCH
        self._largest = 0
        self._samples_read = False  # whether the script has ever asked for `samples`
        self.draw: Draw | None = None
        """Which step and samples it is of; ``None`` outside the loop."""
        self.weight: float | None = None
        """From the loader's weight function, if there is one."""
        self.retry = Retry.NO
        """What comes again because it did not fit into memory."""
        self.clean = False
        """Whether there were no gradients yet when its step began."""

    @property
    def committed(self) -> bool:
        return self._state in COMMITTED

    @property
    def backward_began(self) -> bool:
        """Whether a backward pass of it has begun, ended or not."""
        return self._state in BACKWARD_BEGAN

    @property
    def failed(self) -> bool:
        """Whether a backward pass began to synchronise the step and never came through."""
        draw = self.draw
        return draw is not None and draw.last and self._state is StepState.BACKWARD

    @property
    def mid_step(self) -> bool:
        """Whether some, but not all, of the current step's backward passes have run."""
        if self.draw is None or self.committed:
            return False
        return self._state is StepState.BACKWARD or not self.draw.first

    @property
    def unstepped(self) -> bool:
        """Whether its step is committed, but the optimizer's step has not been seen."""
        if self._state not in UNSTEPPED:
            return False
        # A gradient scaler that skips a step never calls the optimizer, and some update the
        # weights by hand; gradients that are gone show that the step is over nevertheless.
        # Asked of the models anew, as a script may have replaced parameters.
        gradients = [p.grad for model in self._watched.models for p in model.parameters()]
        return not self._watched.models or any(g is not None and bool(g.any()) for g in gradients)

    @property
    def synced(self) -> bool:
        """Whether it is the last of its step, so that the optimizer is due."""
        return self.draw is None or (self.draw.last and not self.retry)

    @property
    def samples(self) -> int:
        """Samples of it that count."""
        return 0 if self.draw is None or self.retry else self.draw.samples

    def read_samples(self) -> int:
        """Return `samples` to the script, and remember that it asks."""
        self._samples_read = True
        return self.samples

    def warn_of_placeholder(self) -> None:
        """Warn once if a batch that counts for nothing was trained, and the script never asks."""
        draw = self.draw
        if draw is not None and not draw.samples and not self._samples_read:
            self._samples_read = True
            usage_errors.tell_of_placeholder(draw.step)

    def largest(self) -> int:
        """Return the samples of the largest batch since the last call, or in hand (any thread)."""
        draw, largest = self.draw, self._largest
        # The batch in hand may come to its peak after this call, so it counts again.
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
            # Only a micro-batch before the last can be repeated once its backward pass began.
            self.clean = self._watched.without_gradients

    def give_up(self, what: Retry) -> None:
        self._state = after(self._state, StepEvent.OUT_OF_MEMORY)
        self.retry = what

    def leave(self) -> None:
        if self.mid_step and not self.failed:
            logger.warning(
                "the loop was left between two micro-batches of step %d; the step will be drawn "
                "again as a whole, so call optimizer.zero_grad() first",
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
        """Raise `UsageError` if the batch did not fit into memory, so that it is lost."""
        if self.retry:
            raise UsageError(
                "the batch in hand did not fit into memory and comes again, so no more can be done "
                "with it; put all of its passes into one `with stride.guard():`"
            )
