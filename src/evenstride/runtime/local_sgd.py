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

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer

from evenstride.core.rounds import Place, ends_round, on_their_own
from evenstride.core.sync import LocalSgd
from evenstride.core.weighting import loss_factor
from evenstride.errors import ConfigError, UsageError
from evenstride.runtime import misuse
from evenstride.runtime.joint import Joint
from evenstride.runtime.outer import Outer
from evenstride.runtime.sampler import Draw
from evenstride.runtime.timing import StepTimer
from evenstride.runtime.trained import Trained


class LocalTraining:
    """Lets a worker's optimizer step by itself, and averages the weights where a round ends.

    Args:
        mode: what is averaged when, and what becomes of it.
        join: makes what brings the ranks' tensors together; collective.
        timer: the clock of this rank's steps.
        place: tells where a batch's step stands in the run.
    """

    takes_left_out = True
    """Whether `after_step` may be told ``None``: a gradient scaler has left out the step."""

    def __init__(
        self,
        mode: LocalSgd,
        join: Callable[[], Joint],
        timer: Callable[[], StepTimer],
        place: Callable[[Draw], Place],
    ) -> None:
        self._mode, self._timer, self._place_of = mode, timer, place
        self._join: Callable[[], Joint] | None = join
        self._opened: Joint | None = None
        self._trained = Trained()
        self._optimizers: list[Optimizer] = []
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

        Raises:
            UsageError: no model is watched.
        """
        joint, self._draw, self._place = self._joint, draw, self._place_of(draw)
        if not self._alone:
            return loss_factor(joint.world_size, draw.samples, draw.window)
        return draw.samples / draw.trained if draw.samples else 0.0

    def watch(self, module: nn.Module) -> None:
        """Know a module's parameters and buffers; collective."""
        if self._opened is None and self._join is not None:
            self._opened = self._join()
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
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        new, mine = self._enter(), self._trained.of(optimizer)
        if not self._alone:
            # Around all but the first optimizer of a step the caller counts the time as waiting.
            with self._timer().waiting() if new else nullcontext():
                self._joint.gradients(self._place.step, mine)
            return
        self._outer.begin(mine)
        if not self._draw.trained:
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
            self._joint.gradients(self._place.step, mine, left_out=True)
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
            self._average(self._trained.trainable if self._alone else [])

    def bring_home(self) -> None:
        """Make one of the ranks, for a checkpoint: `settle`, and average optimizer states, too.

        Collective, between two steps. A run that is restored then goes on as the one that was saved
        does. States of another shape than their parameter, such as counts of steps, and states
        that not all ranks have yet, stay each rank's own.
        """
        self.settle()
        if self._alone:
            for optimizer in self._optimizers:
                states = self._trained.states_of(optimizer)
                self._joint.states(self._place.step, states, self._samples)

    @property
    def remembers(self) -> bool:
        """Whether it has a state that a checkpoint needs: the outer momentum."""
        return self._mode.outer_momentum > 0

    def state_dict(self) -> dict[str, Any]:
        """Return the outer optimizer's velocities by parameter: the same on all ranks."""
        return {"velocities": self._outer.state(self._trained.by_name)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, once the models are watched."""
        self._outer.load(state["velocities"], self._trained.by_name)
        self._over = self._settled = True

    def close(self, *, in_order: bool) -> None:
        """Let go of the process groups. May be called again.

        Args:
            in_order: whether all is well: then it is told if the ranks' models differ.
        """
        if in_order and self._opened is not None and not self._settled:
            misuse.tell_of_models(self._place.step + 1)
            self._settled = True
        if self._opened is not None:
            self._opened.close()
        self._join = self._draw = self._entered = None
        self._optimizers.clear()

    @property
    def _alone(self) -> bool:
        return on_their_own(self._mode, self._place)

    @property
    def _joint(self) -> Joint:
        if self._opened is None:
            raise UsageError(
                "this mode of synchronisation trains models that stride.watch() was given; call "
                "model = stride.watch(model) before the loop"
            )
        return self._opened

    def _average(self, parameters: list[nn.Parameter]) -> None:
        """Average parameters, and buffers if that is due, by the samples of the round."""
        trained = self._trained if self._buffers_due else None
        means = self._joint.weights(self._place.step, parameters, self._samples, trained)
        for parameter, mean in means:
            self._outer.step(parameter, mean)
        self._over, self._settled, self._buffers_due = True, True, False

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
        self._samples += 0 if left_out else draw.trained
        self._buffers_due = self._trained.has_buffers
        self._settled = not (self._alone or self._buffers_due)
        return True


def _refuse_fused(optimizer: Optimizer) -> None:
    if getattr(optimizer, "grad_scale", None) is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} leaves out steps for the gradient scaler by itself, so it "
            "cannot be told whether it has trained the samples of a step; make it with fused=False"
        )
