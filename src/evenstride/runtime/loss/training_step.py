"""The training step of a rank: each loss is scaled so that the averaged gradient is exact.

The table in `batch_in_hand` defines what may happen to a batch, and in which order. `scale` and the
hooks run in every step; `evenstride.runtime.timing.step_timer` explains why they make few calls.

A rank with a share of 0 still takes part in the collectives of the gradient. It runs a placeholder
sample, whose loss has weight 0. But ``0 * inf`` is NaN: a loss or an activation that is not finite
would spoil the gradients of every rank. So values that are not finite are replaced by 0 before the
engine reduces the gradients. Finite values are 0 already, or belong to a term that the user adds to
the scaled loss, such as a weight penalty. They are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evenstride.core.gradients.weighting import loss_factor
from evenstride.core.sampling.draw import Draw
from evenstride.errors import ScaleError
from evenstride.runtime import usage_errors
from evenstride.runtime.batch_norm.norm_layers import PlainNorms
from evenstride.runtime.engines.ddp import InnerWaits
from evenstride.runtime.engines.watched_models import WatchedModels
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits
from evenstride.runtime.loss.batch_in_hand import BatchInHand, StepEvent
from evenstride.runtime.loss.loss_convention import Convention, Scaled
from evenstride.runtime.loss.no_sync import Accumulation
from evenstride.runtime.loss.step_hooks import BackwardHooks, OptimizerHooks, refuse_inside
from evenstride.runtime.noise.noise_meter import NoiseMeter
from evenstride.runtime.synchronisation.synchroniser import Synchroniser
from evenstride.runtime.timing.device_timer import RankClock


class TrainingStep:
    """The parts of one rank that process a batch, from its loading to the optimizer's step."""

    def __init__(
        self,
        world_size: int,
        clock: RankClock,
        watched: WatchedModels,
        batch: BatchInHand,
        limits: MicroBatchLimits,
        commit: Callable[[Draw], None],  # called after the synchronisation of a step
        weights: WeightExchange,
        *,
        by_hand: bool = False,  # whether the script averages the gradients itself
        sync: Synchroniser | None = None,  # replaces the engine's averaging
        convention: Convention | None = None,  # checks the first loss
        noise: NoiseMeter | None = None,
        add_up: Callable[[Draw], None] | None = None,  # sums gradients of all ranks, sans engine
    ) -> None:
        self.clock, self.watched, self.batch, self.limits = clock, watched, batch, limits
        self.weights, self.noise = weights, noise
        self.inner_waits = InnerWaits(clock)
        self._norms = PlainNorms(world_size, limits)
        self.backward = BackwardHooks(
            clock, batch, watched, self.inner_waits, noise, commit, add_up, by_engine=sync is None
        )
        self.optimizers = OptimizerHooks(clock, batch, watched, self.backward, sync)
        self.accumulation = Accumulation(batch, world_size, by_engine=sync is None and not by_hand)
        self.scaling = LossScaling(
            world_size,
            clock,
            batch,
            watched,
            limits,
            self.accumulation,
            self.backward,
            weights,
            sync=sync,
            convention=convention,
            noise=noise,
        )

    @property
    def own_s(self) -> float:
        """Time spent in evenstride's own code on the training thread, in seconds."""
        own_s = self.scaling.own_s + self.backward.own_s
        return own_s if self.noise is None else own_s + self.noise.own_s

    def watch(self, model: nn.Module) -> None:
        self.watched.add(model)
        self._norms.watch(model)
        self.limits.watch_norms(plain=self._norms.any)

    def begin(self, draw: Draw, weight: float | None) -> None:
        """Note a batch that the training loop gets."""
        self.backward.batch_came()
        # First: the hooks of a batch without samples would change the next batch's gradients.
        self.scaling.ghosts.end()
        self._norms.begin(draw)
        if self.noise is not None:
            self.noise.begin(draw)
        self.accumulation.held.clear()
        self.batch.begin(draw, weight)

    def leave(self) -> None:
        """Drop the current batch, because the loop stopped."""
        self.scaling.ghosts.end()
        if self.noise is not None:
            self.noise.pass_ended()
        self.batch.leave()

    def close(self) -> None:
        """Release the models and of parts of the process group; see `Channel.close`."""
        self.weights.close()
        self.inner_waits.close()
        self.watched.clear()


class LossScaling:
    """The exact weighting of one rank's losses."""

    def __init__(
        self,
        world_size: int,
        clock: RankClock,
        batch: BatchInHand,
        watched: WatchedModels,
        limits: MicroBatchLimits,
        accumulation: Accumulation,
        backward: BackwardHooks,
        weights: WeightExchange,
        *,
        sync: Synchroniser | None,  # replaces the engine's averaging, if given
        convention: Convention | None,  # checks the first loss
        noise: NoiseMeter | None,
    ) -> None:
        self._world_size, self._clock, self._batch = world_size, clock, batch
        self._watched, self._limits, self._accumulation = watched, limits, accumulation
        self._backward, self._weights, self._sync = backward, weights, sync
        self._convention, self._noise = convention, noise
        self.ghosts = ZeroShares(watched.models, batch.warn_of_placeholder)
        """Keeps results of a placeholder sample out of the gradients."""
        self.by_argument = False
        """Whether weights were given to `scale`."""
        self.own_s = 0.0

    def check_losses_of(self, model: nn.Module) -> None:
        if self._convention is not None:
            self._convention.watch(model)

    def scale(self, loss: Tensor, weight: float | Tensor | None, reduction: str = "mean") -> Tensor:
        """Return ``loss * W * n_k / N``; see `Stride.scale`."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise usage_errors.not_one_number(loss)
        # In a script that watches no model, the first loss shows the device.
        if not self._watched.models:
            self._clock.time_on(loss.device)
        timer, batch = self._clock.timer, self._batch
        refuse_inside(capturing=timer.capturing)
        started_s, waited_s = timer.now(), 0.0
        draw = batch.draw
        # One condition for all rare cases: most steps make none of these checks.
        unusual = self._limits.micro or bool(batch.retry) or weight is not None
        if draw is None or unusual or hasattr(loss, "_evenstride_scaled"):
            draw = self._checked(loss, weight)
        if reduction != "mean":
            factor = self._summed(draw, weight, reduction)
        elif weight is None and batch.weight is None:
            whole = loss_factor(self._world_size, draw.samples, draw.window)
            factor = whole if self._sync is None else self._sync.factor(draw)
        else:
            factor, waited_s = self._weighed(draw, weight)
        if self._noise is not None:
            self._noise.lost(loss if reduction == "mean" else _mean_of_sum(loss, draw))
        # FSDP2 hooks a loss that its model returns. Our hook must run first, so on a new tensor.
        same = factor == 1.0 and not self._watched.sharded
        scaled = loss if same else loss * factor if factor else self.ghosts.silent(loss)
        if self._convention is not None:
            waited_s += self._see(Scaled(loss, draw, weight, reduction), scaled)
        # Before the backward pass, but as late as possible: until now the forward pass can repeat.
        self._accumulation.late.make_ready(scaled)
        self._backward.follow(scaled)
        # Both, because scaling twice is an error for any factor.
        loss._evenstride_scaled = scaled._evenstride_scaled = True  # type: ignore[attr-defined]
        batch.happened(StepEvent.SCALE)
        self.own_s += timer.now() - started_s - waited_s
        return scaled

    def _checked(self, loss: Tensor, weight: float | Tensor | None) -> Draw:
        self._batch.refuse_after_failure()
        draw, micro = self._batch.draw, self._limits.micro
        if draw is None:
            raise usage_errors.outside_loop()
        if hasattr(loss, "_evenstride_scaled"):
            raise usage_errors.scaled_twice(draw.step)
        if micro and not self._accumulation.active:
            raise usage_errors.not_accumulated()
        if weight is not None and (micro or self._batch.weight is not None):
            raise usage_errors.weight_of_a_piece()
        self._backward.check_gradients(draw)
        return draw

    def _weighed(self, draw: Draw, weight: float | Tensor | None) -> tuple[float, float]:
        """Return the factor of a batch that has a weight, and the seconds spent waiting."""
        # Collective on its first call, so before the clock is read.
        self._weights.open()
        local, timer = self._batch.weight, self._clock.timer
        started_s = timer.now()
        if weight is not None:
            self.by_argument = True
            local = 0.0 if draw.samples == 0 else checked(weight)
            self._weights.start(local)
        total = self._weights.total()
        assert local is not None, "one of the two weights is given"
        if self._noise is not None:
            self._noise.weighed(local, total)
        return loss_factor(self._world_size, local, total), timer.now() - started_s

    def _summed(self, draw: Draw, weight: float | Tensor | None, reduction: str) -> float:
        """Return the factor of a loss that adds up over the ranks to that of the global batch."""
        if reduction != "sum":
            raise usage_errors.unknown_reduction(reduction)
        if weight is not None or self._batch.weight is not None:
            raise usage_errors.sum_with_weight()
        # Without a common step there is no global batch to which losses could add up.
        if draw.claimed:
            raise usage_errors.sum_without_steps()
        if not draw.samples:
            return 0.0
        if self._sync is None:
            return float(self._world_size)
        return self._sync.factor(draw) * draw.window / draw.samples

    def _see(self, given: Scaled, scaled: Tensor) -> float:
        assert self._convention is not None, "the caller has checked it"
        started_s = self._clock.timer.now()
        if given.weight is None:
            given = given._replace(weight=self._batch.weight)
        with self._clock.waiting():
            self._convention = self._convention.see(given)
        if self._convention is not None:
            self._convention.follow(scaled)
        return self._clock.timer.now() - started_s


def _mean_of_sum(loss: Tensor, draw: Draw) -> Tensor:
    """Turn a loss that adds up to that of the global batch into a mean over this batch."""
    return loss.detach() * (draw.window / draw.samples) if draw.samples else loss


def zero_loss(loss: Tensor) -> Tensor:
    """Return a loss of exactly 0 that still reaches the whole graph of ``loss``."""
    return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0) * 0.0


def silence(loss: Tensor, models: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Keep values that are not finite out of the gradients, until the handles are removed."""
    # The graph has leaves of unwatched models. Activation checkpointing hides leaves from that
    # walk, so all watched parameters are added.
    reached = [*_leaves(loss), *(p for model in models for p in model.parameters())]
    silenced = {id(p): p for p in reached if p.requires_grad}.values()
    return [p.register_hook(_finite) for p in silenced]  # type: ignore[no-untyped-call]


class ZeroShares:
    """Keeps results of a placeholder sample out of the gradients, until the next batch."""

    def __init__(
        self,
        models: Sequence[nn.Module],  # may grow
        ended: Callable[[], None] = lambda: None,  # called after each placeholder
    ) -> None:
        self._models, self._ended = models, ended
        self._silenced: list[RemovableHandle] = []

    def silent(self, loss: Tensor) -> Tensor:
        """Return a loss of 0 whose backward pass adds exact zeros until `end`."""
        silent = zero_loss(loss)
        if silent.requires_grad:
            # Until the next batch: a step may have several losses, in any order.
            self._silenced += silence(silent, self._models)
        return silent

    def end(self) -> None:
        """Let backward passes add their results again."""
        if self._silenced:
            for handle in self._silenced:
                handle.remove()
            self._silenced.clear()
            self._ended()


def _finite(gradient: Tensor) -> Tensor:
    return torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)


def _leaves(loss: Tensor) -> Iterable[Tensor]:
    seen: set[object] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(following for following, _ in node.next_functions)


class WeightExchange:
    """Sums one number per rank over a small process group of its own, on the CPU.

    The sum starts when the batches of a step are loaded, and is needed when its loss is scaled. By
    then all ranks have usually begun the step. The remaining wait counts as waiting time.
    """

    # `join` creates a Gloo group of the same ranks, `None` with one process; collective.
    def __init__(self, join: Callable[[], dist.ProcessGroup | None], clock: RankClock) -> None:
        self._join, self._clock = join, clock
        self._group: dist.ProcessGroup | None = None
        self._opened = False
        self._sum = torch.zeros(1, dtype=torch.float64)
        self._work: dist.Work | None = None

    def open(self) -> None:
        """Create the group if necessary, as few runs need it; collective on the first call."""
        if not self._opened:
            self._group, self._opened = self._join(), True

    def close(self) -> None:
        """Release the process group; see `Channel.close`."""
        self._group, self._work = None, None

    def start(self, weight: float) -> None:
        """Start a sum; every rank must call it once per step."""
        self._sum = torch.tensor([checked(weight)], dtype=torch.float64)
        if self._group is not None:
            work = dist.all_reduce(self._sum, group=self._group, async_op=True)
            assert work is not None, "this rank is in the group"
            self._work = work

    def total(self) -> float:
        """Return the sum that `start` began; may be called again."""
        if self._work is not None:
            with self._clock.waiting():
                self._work.wait()
            self._work = None
        return float(self._sum)


def checked(weight: float | Tensor) -> float:
    """Return the weight as a float; raise `ScaleError` if it is negative or not finite."""
    value = float(weight)
    if not math.isfinite(value) or value < 0:
        raise ScaleError(
            f"the weight of a batch is {value}; it must be a finite number of at least 0, such as "
            "the number of tokens without padding"
        )
    return value
