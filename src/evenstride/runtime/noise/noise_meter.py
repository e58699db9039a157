"""Measures the noise of the gradient, in every m-th step.

Every rank computes the squared norm of its own gradient before the engine averages it, and that of
the averaged gradient when the step commits. Each exchange sends these two numbers and the step's
loss to the leader; `evenstride.core.gradients.noise_scale` explains them. The gradients are only
read, so training does not change. A single process compares the micro-batches of its steps.
Parameter servers return the second number with the weights.

The weights of the losses are divided out. Any other common factor, such as a gradient scaler's, is
in both numbers: its square is in noise and signal, and cancels in their ratio. `NoiseSummary`
summarises the measured steps of a run.
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
from evenstride.core.sync_modes.mode_specs import AllReduce, ParameterServerMode, SyncMode
from evenstride.errors import ConfigError
from evenstride.runtime.engines.watched_models import engine_of, is_sharded
from evenstride.runtime.noise.noise_parts import (
    MicroBatches,
    OwnGradient,
    PartNorms,
    Reading,
    SentGradient,
    StepLoss,
    square,
)
from evenstride.runtime.timing.device_timer import RankClock

# Steps kept until the next exchange; exchanges are at most 512 steps apart.
_MOST_MEASURED = 1024

UNWATCHED = "no model was passed to stride.watch()"
IN_ONE = (
    "a single process compares the micro-batches of a step, but the step had one batch; use "
    "loader(max_micro_batch=...) and stride.accumulate()"
)
LEFT = (
    "gradients from before the step were left; call optimizer.zero_grad() after every step, for "
    "all watched parameters"
)
AGAIN = "another backward pass followed in the same step, after its gradients had been averaged"
SPARSE = "some gradients are sparse"
NOTHING = "no watched parameter received a gradient"
IN_PARTS = (
    "a step's gradient is sent to the parameter servers in parts, because several optimizers step "
    "it, or it is sparse; use one optimizer with several parameter groups"
)
TWO_WEIGHTS = "losses of one batch had different weights"
DEVICES = "the model is on several devices"


def check_mode(every: int, mode: SyncMode) -> None:
    """Refuse a mode that does not average the ranks' gradients of every step.

    Without lockstep, an update has one rank's gradient, and those of other ranks belong to other
    weights. Their difference would contain the change of the gradient as well as its noise.
    """
    if every and not isinstance(mode, AllReduce | ParameterServerMode):
        raise ConfigError(
            f"noise_every={every} compares the ranks' gradients at the same weights with their "
            f'mean, but sync="{mode}" does not compute this mean in every step; remove noise_every '
            '(and EVENSTRIDE_NOISE), or use sync="bsp" or sync="bsp-ps"'
        )


def check_model(every: int, model: nn.Module) -> None:
    """Refuse a sharded model: no rank ever holds its own whole gradient."""
    if is_sharded(model) or any(hasattr(p, "placements") for p in model.parameters()):
        raise ConfigError(
            f"noise_every={every} needs each rank's own gradient, but watch() got a sharded model "
            "(FSDP2, DTensor), whose gradients are reduced before they can be read. Use "
            "DistributedDataParallel, or remove noise_every (and EVENSTRIDE_NOISE). If "
            'global_batch is "auto", then also set it to a number (or set EVENSTRIDE_GLOBAL_BATCH)'
        )


@dataclass(slots=True)
class _NoiseStep:
    """The current step, which is measured."""

    step: int
    batch: float  # ``N``, its weight over all ranks
    weight: float  # of the current batch
    loss: StepLoss  # of this rank's samples

    weighed: bool = False  # whether the weight is set, instead of the number of samples
    begun: bool = False  # whether a backward pass has begun
    # Squared norm of the gradients before the step; ``None`` without any.
    left: Tensor | None = None

    def weigh(self, weight: float, batch: float) -> None:
        """Set the weight of the current batch and ``N`` of its step."""
        self.weight, self.batch, self.weighed = weight, batch, True

    def begin(self, left: Tensor | None) -> None:
        self.begun, self.left = True, left

    def next_piece(self, samples: int) -> None:
        self.weight, self.weighed = samples, False

    def give_up(self) -> None:
        """Give the current batch the weight 0: it will be repeated."""
        self.weight = 0.0


class _Unread(NamedTuple):
    """A committed step whose squared norms (local, mean, left) and loss are not read yet."""

    step: int
    parts: int
    weight: float
    batch: float
    losses: bool  # whether the loss is known
    reading: Reading


class NoiseMeter:
    """Measures every m-th step of one rank. Only `take` may be called on other threads."""

    def __init__(self, every: int, world_size: int, clock: RankClock) -> None:
        self.every, self.own_s, self.weighted = every, 0.0, False
        self._sent: SentGradient | None = None
        self.why = UNWATCHED  # why the latest measured step has no result; empty if it has one
        self._world_size, self._clock = world_size, clock
        self._parts: OwnGradient | SentGradient | MicroBatches = MicroBatches()
        if world_size > 1:
            self._parts = OwnGradient(self._spent)
        self._parameters: list[nn.Parameter] = []
        self._never = False
        self._step: _NoiseStep | None = None
        self._committed = False  # whether the current step has been measured completely
        self._unread: deque[_Unread] = deque()
        self._measured: deque[StepParts] = deque(maxlen=_MOST_MEASURED)

    def of_sent(self) -> SentGradient:
        """Measure the gradients that are sent to parameter servers, through the returned object."""
        self._parts = self._sent = SentGradient(self._spent)
        return self._sent

    def watch(self, model: nn.Module) -> None:
        if self._never:
            return
        engine, ignored = engine_of(model), set[str]()
        if isinstance(engine, DistributedDataParallel):
            ignored, engine = set(getattr(engine, "parameters_to_ignore", ())), engine.module
        elif self._world_size > 1 and self._sent is None:
            kind = type(engine).__name__
            self._refuse(
                f"the engine ({kind}) averages gradients at an unknown time; only "
                "DistributedDataParallel can be measured"
            )
            return
        new = [p for name, p in engine.named_parameters() if name not in ignored]
        self._parameters, self.why = list(dict.fromkeys([*self._parameters, *new])), ""
        # Norms on several devices cannot be added up without waiting for the devices.
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
        """Note the weight of the current batch, if it is set, and that of its step."""
        self.weighted, step = True, self._step
        if step is None:
            return
        if step.weighed and step.weight != weight:
            self.drop()
            self.why = TWO_WEIGHTS
        step.weigh(weight, batch)

    def lost(self, loss: Tensor) -> None:
        """Note a loss of the current batch, before scaling."""
        if self._step is not None:
            self._step.loss.add(loss)

    def backward_began(self) -> None:
        """Note that a backward pass of the current batch begins."""
        step = self._step
        if step is None:
            if self._committed:
                # This pass changes the gradients that were measured.
                self._unread.pop()
                self._committed, self.why = False, AGAIN
        elif not step.begun:
            started_s = self._clock.timer.now()
            left = [p.grad for p in self._parameters if p.grad is not None and not p.grad.is_sparse]
            step.begin(square(left) if left else None)
            self._spent(self._clock.timer.now() - started_s)

    def committed(self) -> None:
        """Measure the averaged gradient of the committed step, before any code changes it."""
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
            self.why = NOTHING if self._sent is None else IN_PARTS
        elif found.parts == self._world_size == 1:
            self.why = IN_ONE
        else:
            self._unread.append(self._start_reading(step, found, mean))
            self._committed = True
        self._clock.timer.exclude(self._clock.timer.now() - started_s)

    def gave_up(self) -> None:
        """Note that the current batch did not fit into memory and has added no gradient."""
        if self._step is not None:
            self._step.give_up()

    def drop(self) -> None:
        """Stop measuring the current step."""
        self._parts.drop()
        self._step = None

    def pass_ended(self) -> None:
        """Note that the training loop has ended or was left."""
        self.drop()
        self._committed = False
        self._read()

    def take(self) -> tuple[StepParts, ...]:
        """Return the steps measured since the last call (control thread)."""
        measured: list[StepParts] = []
        while self._measured:
            measured.append(self._measured.popleft())
        return tuple(measured)

    def close(self) -> None:
        """Stop measuring, and release the model."""
        self.pass_ended()
        self._parameters, self._never = [], True

    def _begin(self, draw: Draw) -> None:
        # A step of one batch has no second gradient to compare.
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

    def _start_reading(self, step: _NoiseStep, found: PartNorms, mean: list[Tensor]) -> _Unread:
        # A part adds c w g to the gradients, with c = W / N.
        local = found.over_weight * (step.batch / self._world_size) ** 2
        left = torch.zeros_like(local) if step.left is None else step.left
        served = None if self._sent is None else self._sent.mean
        whole = square(mean) if served is None else torch.full_like(local, served)
        total = step.loss.total
        loss = torch.zeros_like(local) if total is None else total
        reading = Reading(torch.stack([local, whole, left, loss]))
        known = total is not None
        return _Unread(step.step, found.parts, found.weight, step.batch, known, reading)

    def _read(self) -> None:
        """Record the committed steps whose numbers have arrived from the device."""
        while self._unread and self._unread[0].reading.there:
            step, parts, weight, batch, known, reading = self._unread.popleft()
            local, mean, left, total = reading.values()
            loss = total if known and isfinite(total) else None
            # Old gradients of unknown origin are in both numbers.
            if left:
                self.why = LEFT
            elif isfinite(local) and isfinite(mean):  # a gradient scaler skips other steps
                self._measured.append(StepParts(step, parts, weight, batch, local, mean, loss))
                self.why = ""

    def _refuse(self, why: str) -> None:
        self._parameters, self._never, self.why = [], True, why

    def _spent(self, seconds: float) -> None:
        """Count time within a pass as overhead, neither as work nor as waiting time."""
        self.own_s += seconds
        self._clock.timer.exclude(seconds)


@dataclass(frozen=True, slots=True)
class NoiseSummary:
    """The recent noise of the gradient; figures are ``None`` until a step has been measured."""

    every: int  # steps from one measured step to the next
    steps: int = 0  # steps measured by all ranks that had samples

    # Noise divided by signal, in units: the batch at which both are equal. It is also ``None`` if
    # no signal is found in the noise.
    scale: float | None = None
    scale_low: float | None = None  # lower end of its 95 % interval
    scale_high: float | None = None  # upper end; ``None`` if the steps do not limit it

    noise: float | None = None  # trace of the covariance of one unit's gradient
    signal: float | None = None  # squared norm of the gradient itself

    # Mean squared norm of the parts divided by that of their mean: from 1 to their number.
    gain: float | None = None

    # ``samples``, or ``weights`` for batches with other weights, such as token counts.
    unit: str = "samples"
    why: str = ""  # why the figures are missing; empty otherwise

    def __str__(self) -> str:
        if self.scale_low is None:
            return f"gradient noise was not measured: {self.why}"
        steps = f"from {self.steps} measured step(s)"
        if self.scale is None:
            return (
                "gradient noise: too large to detect the gradient, so the scale is at least "
                f"{self.scale_low:.3g} {self.unit} (95 %), {steps}"
            )
        low, high = f"{self.scale_low:.3g}", self.scale_high
        between = f"at least {low}" if high is None else f"{low} to {high:.3g}"
        gain = "" if self.gain is None else f"gain {self.gain:.2f}, "
        return (
            f"gradient noise: scale {self.scale:.3g} {self.unit} (95 %: {between}), {gain}{steps}"
        )


def noise_summary(known: NoiseOfRun | None, meter: NoiseMeter | None) -> NoiseSummary | None:
    """Return the known noise, which only the leader has; ``None`` if it is not measured."""
    if meter is None:
        return None
    unit = "weights" if meter.weighted else "samples"
    if known is None:
        why = "this rank has only its own norms; see the summary of rank 0"
        return NoiseSummary(meter.every, unit=unit, why=why)
    if not known.steps:
        why = meter.why or f"no measured step is complete yet; 1 in {meter.every} steps is measured"
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
