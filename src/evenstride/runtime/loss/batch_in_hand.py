"""The batch that the training loop has in its hands."""

from __future__ import annotations

import logging

from evenstride.core.sampling.draw import Draw
from evenstride.errors import UsageError
from evenstride.runtime import usage_errors
from evenstride.runtime.engines.watched_models import WatchedModels
from evenstride.runtime.loading.micro_batches import Retry
from evenstride.runtime.loss.step_state import (
    BACKWARD_BEGAN,
    COMMITTED,
    UNSTEPPED,
    StepEvent,
    StepState,
    after,
)

logger = logging.getLogger("evenstride")


class BatchInHand:
    """The batch in the loop's hands, and how far it has come; only its methods change it.

    Args:
        watched: the models that are trained.
    """

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
        """Whether its step has been synchronised."""
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
        """Go on in the table of states; see `after`."""
        self._state = after(self._state, event)

    def begin(self, draw: Draw, weight: float | None) -> None:
        """Take the next batch in hand."""
        self.draw, self.weight, self.retry = draw, weight, Retry.NO
        if draw.samples > self._largest:
            self._largest = draw.samples
        self._state = after(self._state, StepEvent.DRAW)
        if draw.first and not draw.last:
            # Only a micro-batch before the last can be repeated once its backward pass began.
            self.clean = self._watched.without_gradients

    def give_up(self, what: Retry) -> None:
        """Let the batch, or its whole step, come again."""
        self._state = after(self._state, StepEvent.OUT_OF_MEMORY)
        self.retry = what

    def leave(self) -> None:
        """Drop the batch: the loop was left."""
        if self.mid_step and not self.failed:
            logger.warning(
                "the loop was left between two micro-batches of step %d; the step will be drawn "
                "again as a whole, so call optimizer.zero_grad() first",
                self.draw.step if self.draw else 0,
            )
        self._state = after(self._state, StepEvent.LEAVE)
        self.draw, self.retry = None, Retry.NO

    def check_finished(self) -> None:
        """Raise unless a loss of the batch was scaled and its backward pass ran.

        Raises:
            ScaleError: it was not.
        """
        if self.draw is None:
            return
        if self._state in (StepState.DRAWN, StepState.UNSCALED):
            raise usage_errors.unscaled(self.draw.step)
        if self._state in (StepState.SCALED, StepState.IN_BACKWARD, StepState.UNTRAINED):
            raise usage_errors.no_backward(self.draw.step)

    def refuse_after_failure(self) -> None:
        """Raise if the batch did not fit into memory, so that nothing more can be done with it.

        Raises:
            UsageError: so it was.
        """
        if self.retry:
            raise UsageError(
                "the batch in hand did not fit into memory and comes again, so no more can be done "
                "with it; put all of its passes into one `with stride.guard():`"
            )
