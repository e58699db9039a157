"""Scale each batch's loss so that the averaged gradient is exact, and notice the end of its step.

What may happen to a batch, and in which order, is the table in `step_state`.

`scale` and the callbacks run in every step; see `evenstride.runtime.timing.step_timer` on why
they are written for few calls.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from evenstride.core.gradients.weighting import loss_factor
from evenstride.core.sampling.draw import Draw
from evenstride.errors import UsageError
from evenstride.runtime import usage_errors
from evenstride.runtime.batch_norm.norm_context import PlainNorms
from evenstride.runtime.engines.reentrant_backward import InnerWaits
from evenstride.runtime.engines.weight_drift import DriftGuard
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits
from evenstride.runtime.loading.micro_batches import Retry
from evenstride.runtime.loss.loss_convention import Convention, Scaled
from evenstride.runtime.loss.no_sync import LateSync, hold_back
from evenstride.runtime.loss.scaler_hook import register_scaler_update_hook
from evenstride.runtime.loss.step_state import (
    BACKWARD_BEGAN,
    COMMITTED,
    UNSTEPPED,
    StepEvent,
    StepState,
    after,
)
from evenstride.runtime.loss.token_weights import WeightExchange, checked
from evenstride.runtime.loss.zero_share import ZeroShares
from evenstride.runtime.noise.noise_meter import NoiseMeter
from evenstride.runtime.noise.noise_parts import mean_of_sum
from evenstride.runtime.synchronisation.synchroniser import Synchroniser
from evenstride.runtime.timing.device_timer import CudaMarks, DeviceTimer
from evenstride.runtime.timing.step_timer import StepTimer

logger = logging.getLogger("evenstride")

# Steps after which what ran proves something: optimizers make their states in the first.
_STEPS_TO_WARM = 2

# Micro-batches after which gradients are looked at: a loop that clips there does so each time.
_COMPARISONS = 2


class LossScaling:
    """The exact weighting of one rank, and what has become of the batch in hand.

    Args:
        world_size: ranks the engine averages over.
        timer: gets the marks of the backward pass. Replaced by one that measures on the device
            when a model is watched there, or a loss found there without a watched model.
        commit: called when a step's synchronisation has ended.
        exchange: makes the weight exchange when it is first needed; collective.
        by_hand: whether the script averages the gradients itself.
        convention: looks at the first loss, if it is to be looked at.
        limits: of the sizes of micro-batches; none by default.
    """

    def __init__(
        self,
        world_size: int,
        timer: StepTimer,
        commit: Callable[[Draw], None],
        exchange: Callable[[], WeightExchange],
        *,
        by_hand: bool = False,
        convention: Convention | None = None,
        limits: MicroBatchLimits | None = None,
    ) -> None:
        self.world_size, self.timer, self.exchange = world_size, timer, exchange
        self._commit, self._by_hand, self.convention = commit, by_hand, convention
        self.micro = False  # whether the loader may cut a share into micro-batches
        self.models: list[nn.Module] = []  # the watched ones
        self.parameters: list[nn.Parameter] = []  # of those
        self.unrecorded = False  # whether one has a static graph whose first step is still to come
        self.sharded = self.compiled = False  # whether one is sharded, or compiled
        self.inner_waits = InnerWaits(lambda: self.timer)
        self._sizes: set[int] = set()  # of the batches that have run
        self.own_s, self._largest = 0.0, 0
        self.draw: Draw | None = None  # of the batch in the training loop's hands
        self.retry = Retry.NO  # what comes again because it did not fit into memory
        self.fit = limits or MicroBatchLimits()
        self.norms = PlainNorms(world_size, self.fit)
        self.drift: DriftGuard | None = None
        self.noise: NoiseMeter | None = None
        self.sync: Synchroniser | None = None  # what takes the place of the engine's averaging
        self.syncing = False  # whether that has begun, and not come through
        self.guarding = False  # whether the loop is inside `Stride.guard`
        self.accumulated: list[nn.Module] = []  # models held back for the batch in hand, inside it
        self._late = LateSync()
        self.evaluated = False  # whether there was an evaluation since memory was looked at
        self._commits = 0
        self._gave = False  # whether an earlier micro-batch of the step has given gradients
        self.clean = False  # whether there were no gradients yet when its step began
        self._weight: float | None = None  # of that batch, from weight_fn
        self._comparisons = _COMPARISONS  # of gradients between micro-batches, still to come
        self._left: list[tuple[Tensor, int]] = []  # gradients and their versions, for the next
        self._state = StepState.NO_BATCH
        self._accumulating = False
        self._queued = False  # whether the engine has our callback for the pass that runs
        self.by_argument = False  # whether weights were given to `scale`
        self._samples_read = False  # whether the script has ever asked for `samples`
        self._ghosts = ZeroShares(self.models, self._ghost_ended)

    def listen(self) -> tuple[RemovableHandle, ...]:
        """Be told of every step that an optimizer takes, until the handles are removed."""
        return (
            register_optimizer_step_pre_hook(self.optimizer_steps),
            register_optimizer_step_post_hook(self.optimizer_stepped),
            # For the steps that a gradient scaler leaves out.
            register_scaler_update_hook(self.optimizer_stepped),
        )

    @property
    def committed(self) -> bool:
        """Whether the step of the batch in hand has been synchronised."""
        return self._state in COMMITTED

    @property
    def mid_step(self) -> bool:
        """Whether some, but not all, of the current step's backward passes have run."""
        if self.draw is None or self.committed:
            return False
        return self._state is StepState.BACKWARD or not self.draw.first

    @property
    def unstepped(self) -> bool:
        """Whether the step in hand is committed, but its optimizer step has not been seen."""
        if self._state not in UNSTEPPED:
            return False
        # A gradient scaler that skips a step never calls the optimizer, and some update the
        # weights by hand; gradients that are gone show that the step is over nevertheless.
        gradients = [p.grad for model in self.models for p in model.parameters()]
        return not self.models or any(g is not None and bool(g.any()) for g in gradients)

    @property
    def synced(self) -> bool:
        """Whether the batch in hand is the last of its step, so that the optimizer is due."""
        return self.draw is None or (self.draw.last and not self.retry)

    @property
    def samples(self) -> int:
        """Samples of the batch in hand that count."""
        return 0 if self.draw is None or self.retry else self.draw.samples

    def read_samples(self) -> int:
        """Return `samples` to the script, and remember that it asks."""
        self._samples_read = True
        return self.samples

    def _ghost_ended(self) -> None:
        draw = self.draw
        if draw is not None and not draw.samples and not self._samples_read:
            self._samples_read = True  # warn once
            usage_errors.tell_of_placeholder(draw.step)

    @property
    def backward_began(self) -> bool:
        """Whether a backward pass of the batch in hand has begun, ended or not."""
        return self._state in BACKWARD_BEGAN

    def largest(self) -> int:
        """Return the samples of the largest batch begun since the last call, or in hand now."""
        draw, largest = self.draw, self._largest
        self._largest = 0 if draw is None else draw.samples
        return largest

    @property
    def failed(self) -> bool:
        """Whether a backward pass began to synchronise the step and never came through."""
        draw = self.draw
        return draw is not None and draw.last and self._state is StepState.BACKWARD

    def begin(self, draw: Draw, weight: float | None) -> None:
        """Take note of a batch handed to the training loop."""
        self._ghosts.end()
        self.norms.begin(draw)
        if self.noise is not None:
            self.noise.begin(draw)
        self.draw, self._weight = draw, weight
        if draw.samples > self._largest:
            self._largest = draw.samples
        self._state = after(self._state, StepEvent.DRAW)
        self.retry, self._queued = Retry.NO, False
        self.accumulated.clear()
        self._gave = self._gave and not draw.first
        if draw.first and not draw.last:
            self.clean = all(p.grad is None for p in self.parameters)

    def give_up(self, what: Retry, fits: int) -> None:
        """Let the batch in hand, or its whole step, come again with at most ``fits`` at once."""
        self._state = after(self._state, StepEvent.OUT_OF_MEMORY)
        self.retry, self.micro = what, True
        self.fit.exceeded(fits)
        if what is Retry.STEP:
            for parameter in self.parameters:
                parameter.grad = None
        self.timer.spoil()
        if self.noise is not None:
            self.noise.gave_up()

    def went_through(self) -> None:
        """Note that the batch in hand fitted, in a loop that could have repeated it."""
        if self.accumulated and self.draw is not None and not self.by_argument:
            self.micro = True
            self.fit.fitted(self.draw.samples, warm=self._commits >= _STEPS_TO_WARM)

    def watch(self, model: nn.Module) -> None:
        """Know a model and its parameters."""
        self.models.append(model)
        self.norms.watch(model)
        self.fit.watch_norms(plain=self.norms.any)
        self.parameters += model.parameters()

    def mark(self, *, unrecorded: bool, sharded: bool, compiled: bool) -> None:
        """Note what is particular to one more model's engine.

        Args:
            unrecorded: it has a static graph, which DDP records in the first step.
            sharded: it is sharded by FSDP2.
            compiled: it is compiled.
        """
        self.unrecorded = self.unrecorded or unrecorded
        self.sharded = self.sharded or sharded
        self.compiled = self.compiled or compiled

    def cut(self, *, micro: bool) -> None:
        """Note whether the loader may cut a share into micro-batches."""
        self.micro = micro

    def synchronise_with(self, sync: Synchroniser | None) -> None:
        """Let ``sync`` take the place of the engine's averaging."""
        self.sync = sync

    def guard_against_drift(self, drift: DriftGuard) -> None:
        """Have the loader compare the weights of all ranks from time to time."""
        self.drift = drift

    def enter_guard(self) -> None:
        """Note that the loop is inside `Stride.guard`."""
        self.guarding = True

    def leave_guard(self) -> None:
        """Note that the loop has left `Stride.guard`."""
        self.guarding = False

    def note_evaluation(self) -> None:
        """Note that an evaluation runs, whose memory is not that of a step."""
        self.evaluated = True

    def take_evaluated(self) -> bool:
        """Return whether an evaluation ran since the last call."""
        evaluated, self.evaluated = self.evaluated, False
        return evaluated

    def forget(self) -> None:
        """Drop the batch in hand: the loop was left."""
        if self.mid_step and not self.failed:
            logger.warning(
                "the loop was left between two micro-batches of step %d; the step will be drawn "
                "again as a whole, so call optimizer.zero_grad() first",
                self.draw.step if self.draw else 0,
            )
        self._ghosts.end()
        if self.noise is not None:
            self.noise.pass_ended()
        self._state = after(self._state, StepEvent.LEAVE)
        self.draw, self.retry = None, Retry.NO

    def optimizer_steps(self, optimizer: Optimizer, args: Any = (), named: Any = None) -> None:
        """Synchronise, where that is due at the optimizer's step, and refuse a part of a gradient.

        Raises:
            UsageError: the batch in hand is not the last of its step.
        """
        sync = self.sync
        if self.synced and sync is None:
            return
        ours = {id(p) for p in self.parameters}
        if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            return
        if not self.synced:
            raise usage_errors.stepped_in_midst(self.draw and self.draw.step)
        if sync is not None and self.draw is not None:  # else it is torch's, to make a state
            if any(given is not None for given in (*args[1:], *(named or {}).values())):
                raise usage_errors.stepped_by_closure()
            self._synchronise(sync, optimizer)

    def _synchronise(self, sync: Synchroniser, optimizer: Optimizer) -> None:
        self.syncing = True
        if self.committed:  # another optimizer in the same step
            with self.timer.waiting():
                sync.before_step(optimizer)
            return
        self.timer.gradients_ready()  # what came since then, such as clipping, is work
        sync.before_step(optimizer)

    def optimizer_stepped(self, optimizer: Any = None, *_: Any) -> None:
        """Note that an optimizer has stepped, or a scaler left it out: a step is whole."""
        sync = self.sync
        left_out = optimizer is None and self.failed and not self.syncing
        if sync is not None and left_out and not hasattr(sync, "takes_left_out"):
            raise usage_errors.left_out()
        if sync is not None and (self.syncing or left_out):
            sync.after_step(optimizer)
            self.syncing = False
            if not self.committed:
                self._synchronised()
        left_out = optimizer is None
        event = StepEvent.SCALER_UPDATES if left_out else StepEvent.OPTIMIZER_STEPS
        self._state = after(self._state, event)

    def loop_ended(self) -> None:
        """Note that the loop came to its end: whatever was to be done in its last step is done."""
        self._state = after(self._state, StepEvent.LOOP_ENDS)

    def check_synchronised(self) -> None:
        """Raise if the step in hand was to be synchronised at an optimizer's step that never came.

        Raises:
            UsageError: so it was.
        """
        if self.sync is not None and self.failed and not self.syncing:
            step = -1 if self.draw is None else self.draw.step
            raise usage_errors.not_stepped(step) if self.models else usage_errors.unwatched()

    def check_finished(self) -> None:
        """Raise unless the batch in hand was scaled and its backward pass ran.

        Raises:
            ScaleError: it was not.
        """
        if self.draw is None:
            return
        if self._state in (StepState.DRAWN, StepState.UNSCALED):
            raise usage_errors.unscaled(self.draw.step)
        if self._state in (StepState.SCALED, StepState.IN_BACKWARD, StepState.UNTRAINED):
            raise usage_errors.no_backward(self.draw.step)

    def scale(self, loss: Tensor, weight: float | Tensor | None, reduction: str = "mean") -> Tensor:
        """Return ``loss * W * n_k / N``; see `Stride.scale`."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise usage_errors.not_one_number(loss)
        if loss.is_cuda and not self.models:
            self.time_on(loss.device)
        if self.timer.capturing:
            raise usage_errors.captured()
        started_s, waited_s = self.timer.now(), 0.0
        draw = self.draw
        unusual = self.micro or bool(self.retry) or weight is not None
        if draw is None or unusual or hasattr(loss, "_evenstride_scaled"):
            draw = self._checked(loss, weight)
        if reduction != "mean":
            factor = self._summed(draw, weight, reduction)
        elif weight is None and self._weight is None:
            whole = loss_factor(self.world_size, draw.samples, draw.window)
            factor = whole if self.sync is None else self.sync.factor(draw)
        else:
            factor, waited_s = self._weighed(draw, weight)
        if self.noise is not None:
            self.noise.lost(loss if reduction == "mean" else mean_of_sum(loss, draw))
        self._queued = False  # a backward pass that raised never came to the callback
        # FSDP2 hooks a loss that its model returns. Our hook must run first, so on another tensor.
        same = factor == 1.0 and not self.sharded
        scaled = loss if same else loss * factor if factor else self._ghosts.silent(loss)
        if self.convention is not None:
            waited_s += self._see(Scaled(loss, draw, weight, reduction), scaled)
        self._late.make_ready(scaled)
        if scaled.requires_grad:
            scaled.register_hook(self._backward_began)  # type: ignore[no-untyped-call]
        # Both: scaling twice is the same error whatever the factor.
        loss._evenstride_scaled = scaled._evenstride_scaled = True  # type: ignore[attr-defined]
        self._state = after(self._state, StepEvent.SCALE)
        self.own_s += self.timer.now() - started_s - waited_s
        return scaled

    def time_on(self, device: torch.device) -> None:
        """Measure steps on a model's device from now on, if that works on its own time."""
        if device.type == "cuda" and not self.timer.on_device:
            self.timer = DeviceTimer.instead_of(self.timer, CudaMarks(device))

    def handed_out(self, samples: int) -> None:
        """Leave a step unmodelled that holds the first batch of its size, where that is slow.

        A device chooses kernels and grows its memory for a new size, and a compiled model may be
        compiled again.
        """
        if samples not in self._sizes:
            self._sizes.add(samples)
            if self.compiled or self.timer.on_device:
                self.timer.spoil()

    @contextlib.contextmanager
    def accumulate(self, model: nn.Module) -> Iterator[None]:
        """Hold back the synchronisation unless this is the step's last micro-batch."""
        self._refuse_after_failure()
        if self.draw is None:
            raise UsageError(
                "accumulate() was called outside the training loop; call it inside "
                "`for batch in loader:`, around forward and backward"
            )
        self._accumulating = True
        if self.guarding:
            self.accumulated.append(model)
        try:
            engine = self.sync is None and not self._by_hand
            late = self._late if self.guarding and engine else None
            size = self.world_size if engine else 1
            with hold_back(model, last=self.draw.last, world_size=size, late=late):
                yield
        finally:
            self._accumulating = False

    def _refuse_after_failure(self) -> None:
        if self.retry:
            raise UsageError(
                "the batch in hand did not fit into memory and comes again, so no more can be done "
                "with it; put all of its passes into one `with stride.guard():`"
            )

    def _checked(self, loss: Tensor, weight: float | Tensor | None) -> Draw:
        self._refuse_after_failure()
        draw = self.draw
        if draw is None:
            raise usage_errors.outside_loop()
        if hasattr(loss, "_evenstride_scaled"):
            raise usage_errors.scaled_twice(draw.step)
        if self.micro and not self._accumulating:
            raise usage_errors.not_accumulated()
        if weight is not None and (self.micro or self._weight is not None):
            raise usage_errors.weight_of_a_piece()
        if self._gave and not draw.first and all(p.grad is None for p in self.parameters):
            raise usage_errors.gradients_gone(draw.step)
        if self._left:
            self._compare_gradients(draw)
        return draw

    def _weighed(self, draw: Draw, weight: float | Tensor | None) -> tuple[float, float]:
        """Return the factor of a batch that has a weight, and the seconds spent waiting."""
        exchange, local = self.exchange(), self._weight
        started_s = self.timer.now()
        if weight is not None:
            self.by_argument = True
            local = 0.0 if draw.samples == 0 else checked(weight)
            exchange.start(local)
        total = exchange.total()
        assert local is not None, "one of the two weights is given"
        if self.noise is not None:
            self.noise.weighed(local, total)
        return loss_factor(self.world_size, local, total), self.timer.now() - started_s

    def _summed(self, draw: Draw, weight: float | Tensor | None, reduction: str) -> float:
        """Return the factor of a loss that adds up over the ranks to that of the global batch."""
        if reduction != "sum":
            raise usage_errors.unknown_reduction(reduction)
        if weight is not None or self._weight is not None:
            raise usage_errors.sum_with_weight()
        if draw.claimed:
            raise usage_errors.sum_without_steps()
        if not draw.samples:
            return 0.0
        if self.sync is None:
            return float(self.world_size)
        return self.sync.factor(draw) * draw.window / draw.samples

    def _see(self, given: Scaled, scaled: Tensor) -> float:
        """Let the convention look at a loss; return the seconds that it took."""
        assert self.convention is not None, "the caller has looked"
        started_s = self.timer.now()
        if given.weight is None:
            given = given._replace(weight=self._weight)
        with self.timer.waiting():
            self.convention = self.convention.see(given)
        if self.convention is not None:
            self.convention.follow(scaled)
        return self.timer.now() - started_s

    def _backward_began(self, _: Tensor) -> None:
        """Ask the engine to tell when this rank's last gradient is there.

        Callbacks run in the order they are queued, after the whole graph: ours comes before the
        engine's own wait for other ranks, and one queued from inside it comes after.
        """
        if not self._queued and self.draw is not None:
            if _in_compiled_autograd():
                raise usage_errors.compiled_backward()
            self._queued = True
            self._state = after(self._state, StepEvent.BACKWARD_BEGINS)
            self.inner_waits.backward_began()
            Variable._execution_engine.queue_callback(self._gradients_ready)
            if self.noise is not None:
                self.noise.backward_began()

    def _gradients_ready(self) -> None:
        started_s, self._queued = self.timer.now(), False
        if self.draw is None:
            return
        self._state = after(self._state, StepEvent.GRADIENTS_READY)
        # FSDP2 keeps what is not reduced yet elsewhere.
        self._gave = any(p.grad is not None for p in self.parameters)
        if self.draw.last and self.sync is None:  # else both happen at the optimizer's step
            self.timer.gradients_ready()
            self.inner_waits.gradients_ready()
            Variable._execution_engine.queue_callback(self._synchronised)
        elif self._comparisons and not self.draw.last:
            self._left = [(p.grad, p.grad._version) for p in self.parameters if p.grad is not None]
        self.own_s += self.timer.now() - started_s

    def _compare_gradients(self, draw: Draw) -> None:
        """Warn if gradients were changed since the last micro-batch's backward pass."""
        changed = any(gradient._version != version for gradient, version in self._left)
        self._left = []
        if not draw.first:
            self._comparisons -= 1
            if changed:
                self._comparisons = 0
                usage_errors.tell_of_changed_gradients(draw.step)

    def _synchronised(self) -> None:
        started_s = self.timer.now()
        self.timer.synchronised()
        if self.draw is not None and not self.committed:
            self._state, self.unrecorded = after(self._state, StepEvent.SYNCHRONISE), False
            self._commits += 1
            if self.noise is not None:
                self.noise.committed()
            self._commit(self.draw)
        self.own_s += self.timer.now() - started_s


def _in_compiled_autograd() -> bool:
    """Return whether a backward pass runs as compiled autograd, without importing that."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "in_compiled_autograd_region", False)) or bool(
        getattr(compiled, "compiled_autograd_enabled", False)
    )
