"""Training on one's own between averages: one worker's side of ``local-sgd``.

Each rank's optimizer steps by the mean gradient over its own share, and at the end of a round the
weights of all ranks are averaged. A rank counts by the samples that it trained in the round: with
one step to a round and plain SGD the average is then the step of one process on the union of the
batches, whatever the shares; and each sample has the same say when shares move within a round. A
rank without samples takes no step and does not count. Optimizer states stay each rank's own.

What ranks do together is begun by the same step on all of them, which follows from the position
alone, also where a gradient scaler has left out the optimizer's step on some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from evenstride.core.rounds import Place, ends_round, on_their_own
from evenstride.core.sync import LocalSgd
from evenstride.core.weighting import loss_factor
from evenstride.errors import ConfigError, UsageError
from evenstride.runtime.averaging import anywhere, gathered, summed
from evenstride.runtime.outer import Outer
from evenstride.runtime.sampler import Draw
from evenstride.runtime.timing import StepTimer
from evenstride.runtime.trained import Trained

OpenGroup = Callable[[], dist.ProcessGroup | None]


class _Told(NamedTuple):
    """What a rank tells the others before they bring something together."""

    step: int
    parameters: int
    samples: int
    left_out: int
    without_gradient: int = 0


class LocalTraining:
    """Lets a worker's optimizer step by itself, and averages the weights where a round ends.

    Args:
        mode: what is averaged when, and what becomes of it.
        group: of the ranks, at least two; weights are sent over it.
        small_group: makes another group of the same ranks, that serves the CPU; collective.
        timer: the clock of this rank's steps.
        place: tells where a batch's step stands in the run.
    """

    takes_left_out = True
    """Whether `after_step` may be told ``None``: a gradient scaler has left out the step."""

    def __init__(
        self,
        mode: LocalSgd,
        group: dist.ProcessGroup | None,
        small_group: OpenGroup,
        timer: Callable[[], StepTimer],
        place: Callable[[Draw], Place],
    ) -> None:
        self._mode, self._timer, self._place_of = mode, timer, place
        self._group, self._open_small = group, small_group
        self._small: dist.ProcessGroup | None = None
        self._world_size = dist.get_world_size(group)
        self._trained = Trained()
        self._outer = Outer(mode.outer_rate, mode.outer_momentum)
        self._draw: Draw | None = None  # the latest batch
        self._entered: Draw | None = None  # the latest that has come to an optimizer
        self._place = Place(0, 0, 0, 0, 1)
        self._next_step, self._samples = -1, 0  # samples of this rank in the round
        self._over = self._settled = True
        self._buffers_due = self._stepped = False

    def factor(self, draw: Draw) -> float:
        """Return what makes the gradient the mean over this rank's share; 0 for a ghost.

        In the first ``after`` steps what makes it that over all samples, once it is averaged.
        """
        self._draw, self._place = draw, self._place_of(draw)
        if not self._alone:
            return loss_factor(self._world_size, draw.samples, draw.window)
        return draw.samples / draw.share if draw.samples else 0.0

    def watch(self, module: nn.Module) -> None:
        """Know a module's parameters and buffers; collective."""
        if self._small is None:
            self._small = self._open_small()
        self._trained.watch(module)

    def before_step(self, optimizer: Optimizer) -> None:
        """Average the gradients, in the first ``after`` steps.

        Later a rank without samples drops its own, so that its optimizer leaves the weights alone.

        Raises:
            ConfigError: a gradient is sparse and to be averaged, or the optimizer itself leaves
                out steps for a gradient scaler.
            UsageError: the ranks do not average the same.
        """
        if self._draw is None:  # no step of the run
            return
        _refuse_fused(optimizer)
        new, mine = self._enter(), self._trained.of(optimizer)
        if not self._alone:
            # Around all but the first optimizer of a step the caller counts the time as waiting.
            with self._timer().waiting() if new else nullcontext():
                self._average_gradients(mine, left_out=False)
            return
        self._outer.begin(mine)
        if not self._draw.share:
            for parameter in mine:
                parameter.grad = None

    def after_step(self, optimizer: Optimizer | None) -> None:
        """Average the weights that the optimizer steps, if the step ends a round.

        Args:
            optimizer: that has stepped; ``None`` if a gradient scaler has left that out here. Then
                this rank takes part with the weights it has, and the step's samples do not count.

        Raises:
            UsageError: the ranks do not average the same.
        """
        if self._draw is None:
            return
        if optimizer is None:
            self._enter(left_out=True)
        first, self._stepped = not self._stepped, True
        if first:
            self._timer().gradients_ready()  # up to here it was this rank's own work
        with nullcontext() if first else self._timer().waiting():
            self._together(optimizer)

    def _together(self, optimizer: Optimizer | None) -> None:
        mine = self._trained.trainable if optimizer is None else self._trained.of(optimizer)
        if optimizer is None and self._alone:
            self._outer.begin(mine)
        elif optimizer is None:
            self._average_gradients(mine, left_out=True)
        if ends_round(self._mode, self._place):
            self._average(mine)
        elif self._place.ends_epoch and self._buffers_due:
            self._average([])

    @property
    def settled(self) -> bool:
        """Whether all ranks have one model, between two steps; the same on all ranks."""
        return self._settled

    def settle(self) -> None:
        """End the round now, unless it has ended, so that all ranks have one model.

        Collective, between two steps. What is averaged here would have been later, so training
        takes another course than without; the next rounds end where they would have.
        """
        if not self._settled:
            with self._timer().waiting():
                self._average(self._trained.trainable if self._alone else [])

    def state_dict(self) -> dict[str, Any]:
        """Return the outer optimizer's velocities by parameter: the same on all ranks."""
        return {"velocities": self._outer.state(self._trained.by_name)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, once the models are watched."""
        self._outer.load(state["velocities"], self._trained.by_name)
        self._over = self._settled = True

    def close(self, *, in_order: bool) -> None:
        """Let go of the process groups. May be called again."""
        del in_order
        self._group = self._small = self._draw = self._entered = None
        self._open_small = lambda: None

    @property
    def _alone(self) -> bool:
        return on_their_own(self._mode, self._place)

    def _enter(self, *, left_out: bool = False) -> bool:
        """Count the step in hand; return whether it had not been, for another optimizer."""
        draw, place = self._draw, self._place
        if draw is self._entered or draw is None:
            return False
        self._entered, self._stepped = draw, False
        if self._over or place.step != self._next_step or place.step == self._mode.after:
            self._samples, self._over = 0, False
            self._outer.forget()
        self._next_step = place.step + 1
        self._samples += 0 if left_out else draw.share
        self._buffers_due = self._trained.has_buffers
        self._settled = not (self._alone or self._buffers_due)
        return True

    @torch.no_grad()
    def _average_gradients(self, parameters: list[nn.Parameter], *, left_out: bool) -> None:
        """Give the parameters the mean gradient; none if the step is left out on any rank."""
        missing = sum(p.grad is None for p in parameters)
        told = self._tell(_Told(self._place.step, len(parameters), 0, left_out, missing))
        if any(rank.left_out for rank in told):
            for parameter in parameters:
                parameter.grad = None
            return
        if any(rank.without_gradient for rank in told):
            found = anywhere([p.grad is not None for p in parameters], self._small)
            parameters = [p for p, has in zip(parameters, found, strict=True) if has]
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            _refuse_sparse(parameter.grad)
            gradients.append(parameter.grad)
        for gradient, mean in summed(gradients, 1 / self._world_size, self._group):
            gradient.copy_(mean)

    @torch.no_grad()
    def _average(self, parameters: list[nn.Parameter]) -> None:
        """Average parameters, and buffers if that is due, by the samples of the round."""
        told = self._tell(_Told(self._place.step, len(parameters), self._samples, 0))
        total = sum(rank.samples for rank in told)
        if total:  # otherwise nobody has changed anything
            weight = self._samples / total
            for parameter, average in summed(parameters, weight, self._group):
                self._outer.step(parameter, average)
            if self._buffers_due:
                self._average_buffers(weight)
        self._over, self._settled, self._buffers_due = True, True, False

    def _average_buffers(self, weight: float) -> None:
        """Average the buffers that are not whole numbers; of the others, rank 0's count."""
        buffers, changed = self._trained.changed_buffers()
        changed = anywhere(changed, self._small)
        moved = [b for b, moved in zip(buffers, changed, strict=True) if moved]
        means = [b for b in moved if b.is_floating_point() or b.is_complex()]
        for buffer, mean in summed(means, weight, self._group):
            buffer.copy_(mean)
        for buffer in moved:
            if not (buffer.is_floating_point() or buffer.is_complex()):
                whole = buffer.contiguous()
                dist.broadcast(whole, group=self._group, group_src=0)
                buffer.copy_(whole)
        self._trained.note_buffers()

    def _tell(self, mine: _Told) -> list[_Told]:
        """Return what all ranks tell, in rank order.

        Raises:
            UsageError: they are not about to bring the same together.
        """
        told = [_Told(*numbers) for numbers in gathered(mine, self._small)]
        if len({(rank.step, rank.parameters) for rank in told}) > 1:
            raise _not_alike(told)
        return told


def refuse_weights(mode: object) -> None:
    """Refuse weights other than numbers of samples.

    Raises:
        ConfigError: the mode counts samples.
    """
    if isinstance(mode, LocalSgd):
        raise ConfigError(
            f"weights of batches (weight_fn, or scale(weight=...)) were given with "
            f'sync="{mode}", which counts a rank\'s samples; leave them out, so that each loss is '
            'a mean over samples, or use sync="bsp"'
        )


def _refuse_fused(optimizer: Optimizer) -> None:
    if getattr(optimizer, "grad_scale", None) is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} leaves out steps for the gradient scaler by itself, so it "
            "cannot be told whether it has trained the samples of a step; make it with fused=False"
        )


def _refuse_sparse(gradient: torch.Tensor) -> None:
    if gradient.is_sparse:
        raise ConfigError(
            "a parameter has a sparse gradient, and the first steps of local-sgd(after=...) "
            "average dense ones only; use sparse=False, or leave out after"
        )


def _not_alike(told: Sequence[_Told]) -> UsageError:
    steps = ", ".join(f"{rank.parameters} parameters in step {rank.step}" for rank in told)
    return UsageError(
        f"the ranks are to average different things (in rank order: {steps}); let every rank call "
        "the same optimizers in the same order, and use one optimizer with a gradient scaler, "
        "which may leave out its step on some ranks only"
    )
