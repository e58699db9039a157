"""Scale each batch's loss so that the averaged gradient is exact.

`scale` and the hooks run in every step; see `evenstride.runtime.timing.step_timer` on why they are
written for few calls.
"""

from __future__ import annotations

from torch import Tensor, nn

from evenstride.core.gradients.weighting import loss_factor
from evenstride.core.sampling.draw import Draw
from evenstride.runtime import usage_errors
from evenstride.runtime.engines.watched_models import WatchedModels
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits
from evenstride.runtime.loss.backward_hooks import BackwardHooks
from evenstride.runtime.loss.batch_in_hand import BatchInHand
from evenstride.runtime.loss.loss_convention import Convention, Scaled
from evenstride.runtime.loss.no_sync import Accumulation
from evenstride.runtime.loss.step_state import StepEvent
from evenstride.runtime.loss.token_weights import WeightExchange, checked
from evenstride.runtime.loss.zero_share import ZeroShares
from evenstride.runtime.noise.noise_meter import NoiseMeter
from evenstride.runtime.noise.noise_parts import mean_of_sum
from evenstride.runtime.synchronisation.synchroniser import Synchroniser
from evenstride.runtime.timing.rank_clock import RankClock


class LossScaling:
    """The exact weighting of one rank's losses.

    Args:
        world_size: ranks the engine averages over.
        clock: of this rank's steps.
        batch: in hand.
        watched: the models that are trained.
        limits: of micro-batches.
        accumulation: of the batch in hand.
        backward: follows the backward pass of what is scaled.
        weights: sums the weights of all ranks.
        sync: takes the place of the engine's averaging; ``None`` where the engine does it.
        convention: looks at the first loss; ``None`` if none is to be looked at.
        noise: measures gradients; ``None`` where it is not asked for.
    """

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
        sync: Synchroniser | None,
        convention: Convention | None,
        noise: NoiseMeter | None,
    ) -> None:
        self._world_size, self._clock, self._batch = world_size, clock, batch
        self._watched, self._limits, self._accumulation = watched, limits, accumulation
        self._backward, self._weights, self._sync = backward, weights, sync
        self._convention, self._noise = convention, noise
        self.ghosts = ZeroShares(watched.models, batch.warn_of_placeholder)
        """Keeps what a batch without samples computes out of the gradients."""
        self.by_argument = False
        """Whether weights were given to `scale`."""
        self.own_s = 0.0

    def check_losses_of(self, model: nn.Module) -> None:
        """Look at the first loss that comes from a model, if there is one to be looked at."""
        if self._convention is not None:
            self._convention.watch(model)

    def scale(self, loss: Tensor, weight: float | Tensor | None, reduction: str = "mean") -> Tensor:
        """Return ``loss * W * n_k / N``; see `Stride.scale`."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise usage_errors.not_one_number(loss)
        # A script that watches no model tells its device by its first loss.
        if loss.is_cuda and not self._watched.models:
            self._clock.time_on(loss.device)
        timer, batch = self._clock.timer, self._batch
        if timer.capturing:
            raise usage_errors.captured()
        started_s, waited_s = timer.now(), 0.0
        draw = batch.draw
        # One condition for all that is rare: most steps make none of these checks.
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
            self._noise.lost(loss if reduction == "mean" else mean_of_sum(loss, draw))
        # FSDP2 hooks a loss that its model returns. Our hook must run first, so on another tensor.
        same = factor == 1.0 and not self._watched.sharded
        scaled = loss if same else loss * factor if factor else self.ghosts.silent(loss)
        if self._convention is not None:
            waited_s += self._see(Scaled(loss, draw, weight, reduction), scaled)
        # Before the backward pass, as late as possible: until now the forward pass can be repeated.
        self._accumulation.late.make_ready(scaled)
        self._backward.follow(scaled)
        # Both: scaling twice is the same error whatever the factor.
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
        # Collective when it is done first, so before the clock is read.
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
        if draw.claimed:
            raise usage_errors.sum_without_steps()
        if not draw.samples:
            return 0.0
        if self._sync is None:
            return float(self._world_size)
        return self._sync.factor(draw) * draw.window / draw.samples

    def _see(self, given: Scaled, scaled: Tensor) -> float:
        """Let the convention look at a loss; return the seconds that it took."""
        assert self._convention is not None, "the caller has looked"
        started_s = self._clock.timer.now()
        if given.weight is None:
            given = given._replace(weight=self._batch.weight)
        with self._clock.waiting():
            self._convention = self._convention.see(given)
        if self._convention is not None:
            self._convention.follow(scaled)
        return self._clock.timer.now() - started_s
