"""Independent steps between averages of the weights: one worker's side of ``local-sgd``.

Each rank's optimizer steps by the mean gradient over its own share. At the end of a round, the
weights of all ranks are averaged. A rank's weight in the average is the number of samples that it
trained in the round. So each sample has equal weight, also if shares change within a round. With
one step per round and plain SGD, the average equals one process's step on the global batch,
whatever the shares. A rank without samples takes no step and does not count. Each rank keeps its
own optimizer states.

All ranks start collective calls in the same step. That step follows from the position alone, even
if a gradient scaler skipped the optimizer's step on some ranks.

The outer optimizer computes the new weights from the average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstride.core.gradients.weighting import loss_factor
from evenstride.core.sampling.draw import Draw
from evenstride.core.sync_modes.mode_specs import LocalSgd, RoundPosition, ends_round, on_their_own
from evenstride.errors import ConfigError, UsageError
from evenstride.runtime import usage_errors
from evenstride.runtime.loading.position import CommittedPosition
from evenstride.runtime.synchronisation.weighted_average import (
    TrainedState,
    WeightedAverage,
    sums_as,
)
from evenstride.runtime.timing.device_timer import RankClock


class OuterOptimizer:
    """Steps from the weights at a round's start, by the mean change of the weights in the round.

    The outer gradient is the weights at the round's start minus the average at its end. It is
    applied as by `torch.optim.SGD` with ``nesterov=True``. With outer gradient ``g``, momentum
    ``m`` (0 to below 1) and rate ``r`` (above 0), the velocity becomes ``v = m v + g`` and the
    weights ``start - r (g + m v)``. With rate 1 and no momentum, the result is the average itself.

    Source:
        DiLoCo (Douillard et al., 2023, arXiv 2311.08105) has this outer gradient and Nesterov
        momentum, according to other papers; the paper itself was not available. Not verified: that
        it means torch's form of Nesterov momentum, which starts with ``v = g``. Unlike there, ranks
        are weighted by their samples here.
    """

    def __init__(self, rate: float, momentum: float) -> None:
        self._rate, self._momentum = rate, momentum
        self._starts: dict[nn.Parameter, Tensor] = {}
        self._velocities: dict[nn.Parameter, Tensor] = {}

    @property
    def plain(self) -> bool:
        """Whether the average itself is the result."""
        return self._rate == 1.0 and not self._momentum

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy the weights of parameters whose round begins, unless the optimizer is `plain`.

        Copies of parameters whose round has already begun stay unchanged.
        """
        if self.plain:
            return
        for parameter in parameters:
            if parameter not in self._starts:
                self._starts[parameter] = parameter.detach().clone()

    def forget(self) -> None:
        """Drop the copies, so that new rounds begin from the present weights."""
        self._starts.clear()

    @torch.no_grad()
    def step(self, parameter: nn.Parameter, average: Tensor) -> None:
        """Set a parameter to the result of its round; overwrites ``average``.

        A parameter whose round never began is set to the average.
        """
        start = self._starts.pop(parameter, None)
        if start is None:
            parameter.copy_(average)
            return
        start = start.to(average.dtype)
        gradient = torch.sub(start, average, out=average)
        if self._momentum:
            velocity = self._velocity(parameter).mul_(self._momentum).add_(gradient)
            gradient = gradient.add(velocity, alpha=self._momentum)
        parameter.copy_(start.sub_(gradient, alpha=self._rate))

    def state(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return the velocities by name, equal on all ranks; empty without momentum."""
        if not self._momentum:
            return {}
        return {name: self._velocity(parameter) for name, parameter in parameters.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        """Load velocities that `state` returned; parameters missing from it keep theirs."""
        for name, saved in state.items():
            if name in parameters and self._momentum:
                self._velocity(parameters[name]).copy_(saved)

    def _velocity(self, parameter: nn.Parameter) -> Tensor:
        if parameter not in self._velocities:
            zeros = torch.zeros_like(parameter, dtype=sums_as(parameter.dtype))
            self._velocities[parameter] = zeros.detach()
        return self._velocities[parameter]


class LocalTraining:
    """Lets each worker's optimizer step independently, and averages the weights after each round.

    ``join`` makes the average over the ranks; collective. ``place`` returns the position of a
    batch's step in the run.
    """

    takes_left_out = True
    """Whether `after_step` accepts ``None``, for a step that a gradient scaler skipped."""

    def __init__(
        self,
        mode: LocalSgd,
        join: Callable[[], WeightedAverage],
        clock: RankClock,
        place: Callable[[Draw], RoundPosition],
    ) -> None:
        self._mode, self._clock, self._place_of = mode, clock, place
        self._join: Callable[[], WeightedAverage] | None = join
        self._opened: WeightedAverage | None = None
        self._trained = TrainedState()
        self._optimizers: list[Optimizer] = []
        self._outer = OuterOptimizer(mode.outer_rate, mode.outer_momentum)
        self._draw: Draw | None = None  # the latest batch
        self._entered: Draw | None = None  # the latest batch that reached an optimizer
        self._place = RoundPosition(0, 0, 0, 0, 1)
        self._next_step, self._samples = -1, 0  # samples of this rank in the round
        self._over = self._settled = True
        self._buffers_due = self._stepped = False

    def factor(self, draw: Draw) -> float:
        """Return the factor that makes the gradient the mean over this rank's share.

        It is 0 for a ghost. In the first ``after`` steps, it instead makes the averaged gradient
        the mean over all samples.
        """
        joint, self._draw, self._place = self._joint, draw, self._place_of(draw)
        if not self._alone:
            return loss_factor(joint.world_size, draw.samples, draw.window)
        return draw.samples / draw.trained if draw.samples else 0.0

    def watch(self, module: nn.Module) -> None:
        if self._opened is None and self._join is not None:
            self._opened = self._join()
        self._trained.watch(module)

    def before_step(self, optimizer: Optimizer) -> None:
        """Average the gradients, in the first ``after`` steps.

        Later, a rank without samples drops its gradients, so its optimizer does not change weights.
        """
        if self._draw is None:  # not a step of the run
            return
        _refuse_fused(optimizer)
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        new, mine = self._enter(), self._trained.of(optimizer)
        if not self._alone:
            # For the first optimizer of a step this counts as waiting; for others the caller does.
            with self._clock.waiting() if new else nullcontext():
                self._joint.gradients(self._place.step, mine)
            return
        self._outer.begin(mine)
        if not self._draw.trained:
            for parameter in mine:
                parameter.grad = None

    def after_step(self, optimizer: Optimizer | None) -> None:
        """Average the weights that the optimizer steps, if the step ends a round.

        The optimizer is ``None`` if a gradient scaler skipped its step on this rank. The rank then
        takes part with its present weights, and the step's samples do not count.
        """
        if self._draw is None:
            return
        if optimizer is None:
            self._enter(left_out=True)
        first, self._stepped = not self._stepped, True
        if first:
            self._clock.timer.gradients_ready()  # the time so far was this rank's own work
        with nullcontext() if first else self._clock.waiting():
            self._together(optimizer)

    def _together(self, optimizer: Optimizer | None) -> None:
        mine = self._trained.trainable if optimizer is None else self._trained.of(optimizer)
        if optimizer is None and self._alone:
            self._outer.begin(mine)
        elif optimizer is None:
            self._joint.gradients(self._place.step, mine, left_out=True)
        if ends_round(self._mode, self._place):
            self._average(mine)
        # In the first steps gradients are averaged, so the weights are already equal; buffers are
        # not.
        elif self._place.ends_epoch and self._buffers_due:
            self._average([])

    @property
    def settled(self) -> bool:
        """Whether all ranks have equal models, between two steps; the same on all ranks."""
        return self._settled

    def settle(self) -> None:
        """End the present round, if any, so that all ranks have equal models.

        Collective, between two steps. The early average changes the course of training. The next
        rounds end at the same steps as without it.
        """
        if not self._settled:
            self._average(self._trained.trainable if self._alone else [])

    def bring_home(self) -> None:
        """Make the ranks equal for a checkpoint: `settle`, and also average optimizer states.

        Collective, between two steps. A restored run then continues as the saved one does. Each
        rank keeps its own states whose shape differs from their parameter's, such as step counts,
        and states that some ranks lack.
        """
        self.settle()
        # In the first steps optimizers step by equal gradients, so their states are equal.
        if self._alone:
            for optimizer in self._optimizers:
                states = self._trained.states_of(optimizer)
                self._joint.states(self._place.step, states, self._samples)

    @property
    def remembers(self) -> bool:
        """Whether a checkpoint must save its state: the outer momentum."""
        return self._mode.outer_momentum > 0

    def state_dict(self) -> dict[str, Any]:
        """Return the outer optimizer's velocities by parameter, equal on all ranks."""
        return {"velocities": self._outer.state(self._trained.by_name)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, once the models are watched."""
        self._outer.load(state["velocities"], self._trained.by_name)
        self._over = self._settled = True

    def close(self, *, in_order: bool) -> None:
        """Release the process groups. Idempotent.

        After a run without errors (``in_order``), warn if the ranks' models differ.
        """
        if in_order and self._opened is not None and not self._settled:
            usage_errors.tell_of_models(self._place.step + 1)
            self._settled = True
        if self._opened is not None:
            self._opened.close()
        self._join = self._draw = self._entered = None
        self._optimizers.clear()

    @property
    def _alone(self) -> bool:
        return on_their_own(self._mode, self._place)

    @property
    def _joint(self) -> WeightedAverage:
        if self._opened is None:
            raise UsageError(
                "this synchronisation mode trains only watched models; call "
                "model = stride.watch(model) before the loop"
            )
        return self._opened

    def _average(self, parameters: list[nn.Parameter]) -> None:
        """Average parameters, and buffers if due, weighted by the samples of the round."""
        trained = self._trained if self._buffers_due else None
        means = self._joint.weights(self._place.step, parameters, self._samples, trained)
        for parameter, mean in means:
            self._outer.step(parameter, mean)
        self._over, self._settled, self._buffers_due = True, True, False

    def _enter(self, *, left_out: bool = False) -> bool:
        """Count the present step; return false if another optimizer has already counted it."""
        draw, place = self._draw, self._place
        if draw is self._entered or draw is None:
            return False
        self._entered, self._stepped = draw, False
        # A round begins after the end of another, after a position was loaded, and at the step in
        # which ranks begin to step independently.
        if self._over or place.step != self._next_step or place.step == self._mode.after:
            self._samples, self._over = 0, False
            self._outer.forget()
        self._next_step = place.step + 1
        self._samples += 0 if left_out else draw.trained
        self._buffers_due = self._trained.has_buffers
        self._settled = not (self._alone or self._buffers_due)
        return True


def round_position(progress: CommittedPosition, max_steps: int | None, draw: Draw) -> RoundPosition:
    """Return the position of a batch's step in a run of at most ``max_steps`` steps."""
    return RoundPosition(
        step=progress.earlier + draw.step,
        position=progress.position,
        window=draw.window,
        end=progress.end,
        global_batch=progress.global_batch,
        last=draw.step + 1 in (max_steps, progress.limit),
    )


def _refuse_fused(optimizer: Optimizer) -> None:
    if getattr(optimizer, "grad_scale", None) is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} is fused and skips steps for the gradient scaler by "
            "itself, so evenstride cannot know whether it trained a step's samples; create it with "
            "fused=False"
        )
