"""Measuring how noisy the gradient of a step is, on every m-th step.

Every rank takes the squared norm of its own gradient before the engine averages it, and that of the
averaged one when the step commits. Two numbers per rank are told to the leader with an exchange,
and the step's loss with them; what they mean stands in `evenstride.core.gradients.noise_scale`. The
gradients are only looked at: training goes on as without. A process of its own compares the
micro-batches of its steps.

What weighs the losses is taken out again. What else multiplies all of them alike, such as a
gradient scaler's factor, is in both numbers: its square is in noise and signal, and cancels in
their ratio. `NoiseSummary` says what a run's measured steps have told.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evenstride.core.gradients.noise_scale import NoiseOfRun, StepParts
from evenstride.core.sampling.draw import Draw
from evenstride.core.sync_modes.mode_specs import AllReduce, SyncMode
from evenstride.errors import ConfigError
from evenstride.runtime.engines.watched_models import engine_of, is_sharded
from evenstride.runtime.noise.noise_parts import (
    MicroBatches,
    OwnGradient,
    PartNorms,
    Reading,
    StepLoss,
    square,
)
from evenstride.runtime.timing.device_timer import RankClock

# Steps kept until the next exchange; exchanges are at most 512 steps apart.
_MOST_TOLD = 1024

UNWATCHED = "no model was given to stride.watch()"
IN_ONE = (
    "a single process compares the micro-batches of a step, and there was one batch; give "
    "loader(max_micro_batch=...) and use stride.accumulate()"
)
LEFT = (
    "there were gradients from before the step; call optimizer.zero_grad() after every step, for "
    "all watched parameters"
)
AGAIN = "another backward pass followed in the same step, after its gradients had been averaged"
SPARSE = "some gradients are sparse"
NOTHING = "no watched parameter got a gradient"
TWO_WEIGHTS = "losses of one batch were given different weights"
DEVICES = "the model is on several devices"


def check_mode(every: int, mode: SyncMode) -> None:
    """Refuse to measure in a mode where no gradient is averaged in the backward pass."""
    if every and not isinstance(mode, AllReduce):
        raise ConfigError(
            f"noise_every={every} compares the ranks' gradients with their mean after the same "
            f'backward pass, and sync="{mode}" makes no such mean; leave noise_every out '
            '(EVENSTRIDE_NOISE, too), or use sync="bsp"'
        )


def check_model(every: int, model: nn.Module) -> None:
    """Refuse to measure a sharded model, whose gradients are never whole on one rank."""
    if is_sharded(model) or any(hasattr(p, "placements") for p in model.parameters()):
        raise ConfigError(
            f"noise_every={every} needs each rank's own gradient, and watch() got a sharded model "
            "(FSDP2, DTensor), whose gradients are reduced before they can be seen; leave "
            "noise_every out (EVENSTRIDE_NOISE, too) and give global_batch a number if it is "
            '"auto" (or set EVENSTRIDE_GLOBAL_BATCH), or use DistributedDataParallel'
        )


@dataclass(slots=True)
class _NoiseStep:
    """The measured step in hand."""

    step: int
    batch: float  # ``N``, what it weighs over all ranks
    weight: float  # of the batch in hand
    loss: StepLoss  # of this rank's part of it
    weighed: bool = False  # whether the weight is other than the number of samples
    begun: bool = False  # whether a backward pass has
    # Squared norm of the gradients before it; ``None`` if there were none.
    left: Tensor | None = None

    def weigh(self, weight: float, batch: float) -> None:
        """Give the batch in hand a weight other than its samples, and its step another ``N``."""
        self.weight, self.batch, self.weighed = weight, batch, True

    def begin(self, left: Tensor | None) -> None:
        self.begun, self.left = True, left

    def next_piece(self, samples: int) -> None:
        self.weight, self.weighed = samples, False

    def give_up(self) -> None:
        """Count the batch in hand for nothing: it comes again."""
        self.weight = 0.0


class _Unread(NamedTuple):
    """A committed step whose squared norms (local, mean, left) and loss are on their way."""

    step: int
    parts: int
    weight: float
    batch: float
    losses: bool  # whether the loss is known
    reading: Reading


class NoiseMeter:
    """Measures every m-th step of one rank. All calls but `take` come from the training thread."""

    def __init__(self, every: int, world_size: int, clock: RankClock) -> None:
        self.every, self.own_s, self.weighted = every, 0.0, False
        self.why = UNWATCHED  # the latest step told nothing; empty if it did, or none was measured
        self._world_size, self._clock = world_size, clock
        self._parts: OwnGradient | MicroBatches = MicroBatches()
        if world_size > 1:
            self._parts = OwnGradient(self._spent)
        self._parameters: list[nn.Parameter] = []
        self._never = False
        self._step: _NoiseStep | None = None
        self._committed = False  # whether the step in hand was measured, and that is done
        self._unread: deque[_Unread] = deque()
        self._told: deque[StepParts] = deque(maxlen=_MOST_TOLD)

    def watch(self, model: nn.Module) -> None:
        if self._never:
            return
        engine, ignored = engine_of(model), set[str]()
        if isinstance(engine, DistributedDataParallel):
            ignored, engine = set(getattr(engine, "parameters_to_ignore", ())), engine.module
        elif self._world_size > 1:
            kind = type(engine).__name__
            self._refuse(
                f"it is not known when the engine ({kind}) averages gradients; only "
                "DistributedDataParallel can be measured"
            )
            return
        new = [p for name, p in engine.named_parameters() if name not in ignored]
        self._parameters, self.why = list(dict.fromkeys([*self._parameters, *new])), ""
        # Norms on several devices could not be added up without waiting for them.
        if len({parameter.device for parameter in self._parameters}) > 1:
            self._refuse(DEVICES)

    def begin(self, draw: Draw) -> None:
        if not draw.first:
            if self._step is not None:
                self._next_piece(self._step, draw)
            return
        if self._step is not None:
            self.drop()
        self._committed = False
        if self._unread:
            self._read()
        if draw.step % self.every == self.every - 1 and draw.samples and self._parameters:
            self._begin(draw)

    def weighed(self, weight: float, batch: float) -> None:
        """Note that the batch in hand weighs other than its samples, and what its step does."""
        self.weighted, step = True, self._step
        if step is None:
            return
        if step.weighed and step.weight != weight:
            self.drop()
            self.why = TWO_WEIGHTS
        step.weigh(weight, batch)

    def lost(self, loss: Tensor) -> None:
        """Take note of a loss of the batch in hand, as it was before it was weighed."""
        if self._step is not None:
            self._step.loss.add(loss)

    def backward_began(self) -> None:
        """Note that a backward pass of the batch in hand begins."""
        step = self._step
        if step is None:
            if self._committed:
                # It was measured from gradients that this pass changes.
                self._unread.pop()
                self._committed, self.why = False, AGAIN
        elif not step.begun:
            started_s = self._clock.timer.now()
            left = [p.grad for p in self._parameters if p.grad is not None and not p.grad.is_sparse]
            step.begin(square(left) if left else None)
            self._spent(self._clock.timer.now() - started_s)

    def committed(self) -> None:
        """Take the averaged gradient: the step is committed, and nothing was done to it yet."""
        step = self._step
        if step is None:
            return
        started_s, self._step = self._clock.timer.now(), None
        self._parts.piece_ended(step.weight, last=True)
        step.loss.piece_ended(step.weight)
        found = self._parts.end()
        mean = [p.grad for p in self._parameters if p.grad is not None]
        if any(gradient.is_sparse for gradient in mean):
            self.why = SPARSE
        elif found is None:
            self.why = NOTHING
        elif found.parts == self._world_size == 1:
            self.why = IN_ONE
        else:
            self._unread.append(self._on_its_way(step, found, mean))
            self._committed = True
        self._clock.timer.exclude(self._clock.timer.now() - started_s)

    def gave_up(self) -> None:
        """Note that the batch in hand does not fit into memory, and has added nothing."""
        if self._step is not None:
            self._step.give_up()

    def drop(self) -> None:
        """Leave the step in hand unmeasured."""
        self._parts.drop()
        self._step = None

    def pass_ended(self) -> None:
        """Note that the training loop was left."""
        self.drop()
        self._committed = False
        self._read()

    def take(self) -> tuple[StepParts, ...]:
        """Return what was measured since the last call (control thread)."""
        told: list[StepParts] = []
        while self._told:
            told.append(self._told.popleft())
        return tuple(told)

    def close(self) -> None:
        """Measure no more, and let go of the model."""
        self.pass_ended()
        self._parameters, self._never = [], True

    def _begin(self, draw: Draw) -> None:
        # A step of one batch has nothing to compare it with.
        if draw.last and self._world_size == 1:
            self.why = self.why or IN_ONE
            return
        started_s = self._clock.timer.now()
        losses = StepLoss(self._parameters[0].device)
        self._step = _NoiseStep(draw.step, draw.window, draw.samples, losses)
        self._parts.begin(self._parameters)
        self._clock.timer.exclude(self._clock.timer.now() - started_s)

    def _next_piece(self, step: _NoiseStep, draw: Draw) -> None:
        started_s = self._clock.timer.now()
        self._parts.piece_ended(step.weight, last=False)
        step.loss.piece_ended(step.weight)
        step.next_piece(draw.samples)
        self._clock.timer.exclude(self._clock.timer.now() - started_s)

    def _on_its_way(self, step: _NoiseStep, found: PartNorms, mean: list[Tensor]) -> _Unread:
        # What a part adds to the gradients is c w g with c = W / N.
        local = found.over_weight * (step.batch / self._world_size) ** 2
        left = torch.zeros_like(local) if step.left is None else step.left
        total = step.loss.total
        loss = torch.zeros_like(local) if total is None else total
        reading = Reading(torch.stack([local, square(mean), left, loss]))
        known = total is not None
        return _Unread(step.step, found.parts, found.weight, step.batch, known, reading)

    def _read(self) -> None:
        """Tell of the committed steps whose numbers have come."""
        while self._unread and self._unread[0].reading.there:
            step, parts, weight, batch, known, reading = self._unread.popleft()
            local, mean, left, total = reading.values()
            loss = total if known and isfinite(total) else None
            # They are in both numbers, and nobody knows what they are of.
            if left:
                self.why = LEFT
            elif isfinite(local) and isfinite(mean):  # a gradient scaler leaves such steps out
                self._told.append(StepParts(step, parts, weight, batch, local, mean, loss))
                self.why = ""

    def _refuse(self, why: str) -> None:
        self._parameters, self._never, self.why = [], True, why

    def _spent(self, seconds: float) -> None:
        """Count time in the midst of a pass as our own, and as neither work nor waiting."""
        self.own_s += seconds
        self._clock.timer.exclude(seconds)


@dataclass(frozen=True, slots=True)
class NoiseSummary:
    """The noise of the gradient, of late; figures are ``None`` until a step has been measured."""

    every: int  # steps from one measured step to the next
    steps: int = 0  # measured by all ranks that had samples
    # Noise over signal, in units: the batch at which the two are as large as each other; ``None``
    # also where no signal is found in the noise.
    scale: float | None = None
    scale_low: float | None = None  # lower end of its 95 % interval
    scale_high: float | None = None  # upper end; ``None`` if the steps do not bound it
    noise: float | None = None  # trace of the covariance of one unit's gradient
    signal: float | None = None  # squared norm of the gradient itself
    # Mean squared norm of the parts over that of their mean: 1 to their number.
    gain: float | None = None
    # ``samples``, or ``weights`` where batches are weighed otherwise (by tokens, say)
    unit: str = "samples"
    why: str = ""  # why there are no figures; empty if there are

    def __str__(self) -> str:
        if self.scale_low is None:
            return f"gradient noise was not measured: {self.why}"
        steps = f"from {self.steps} measured step(s)"
        if self.scale is None:
            return (
                f"gradient noise: so large that the gradient is not told from it, a scale of at "
                f"least {self.scale_low:.3g} {self.unit} (95 %), {steps}"
            )
        low, high = f"{self.scale_low:.3g}", self.scale_high
        between = f"at least {low}" if high is None else f"{low} to {high:.3g}"
        gain = "" if self.gain is None else f"gain {self.gain:.2f}, "
        return (
            f"gradient noise: a scale of {self.scale:.3g} {self.unit} (95 %: {between}), "
            f"{gain}{steps}"
        )


def noise_summary(known: NoiseOfRun | None, meter: NoiseMeter | None) -> NoiseSummary | None:
    """Return what is known of the noise, to the leader alone; ``None`` if it was not asked for."""
    if meter is None:
        return None
    unit = "weights" if meter.weighted else "samples"
    if known is None:
        why = "this rank knows only its own part; rank 0's summary is complete"
        return NoiseSummary(meter.every, unit=unit, why=why)
    if not known.steps:
        why = meter.why or f"no measured step is complete yet; one in {meter.every} is measured"
        return NoiseSummary(meter.every, unit=unit, why=why)
    estimate, scale = known.estimate, known.estimate.scale()
    return NoiseSummary(
        every=meter.every,
        steps=known.steps,
        scale=_finite(scale.value),
        scale_low=scale.low,
        scale_high=_finite(scale.high),
        noise=estimate.noise,
        signal=estimate.signal,
        gain=_finite(estimate.gain),
        unit=unit,
    )


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
