"""What happens to one step of a rank, put together.

What may happen to a batch, and in which order, is the table in `step_state`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from evenstride.core.sampling.draw import Draw
from evenstride.runtime.batch_norm.norm_context import PlainNorms
from evenstride.runtime.engines.reentrant_backward import InnerWaits
from evenstride.runtime.engines.watched_models import WatchedModels
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits
from evenstride.runtime.loss.backward_hooks import BackwardHooks
from evenstride.runtime.loss.batch_in_hand import BatchInHand
from evenstride.runtime.loss.loss_convention import Convention
from evenstride.runtime.loss.loss_scaling import LossScaling
from evenstride.runtime.loss.no_sync import Accumulation
from evenstride.runtime.loss.optimizer_hooks import OptimizerHooks
from evenstride.runtime.loss.token_weights import WeightExchange
from evenstride.runtime.noise.noise_meter import NoiseMeter
from evenstride.runtime.synchronisation.synchroniser import Synchroniser
from evenstride.runtime.timing.rank_clock import RankClock


class TrainingStep:
    """The parts of one rank that see a batch from its loading to the optimizer's step.

    Args:
        world_size: ranks the engine averages over.
        clock: gets the marks of each step.
        watched: the models that are trained.
        batch: in hand.
        limits: of micro-batches.
        commit: called when a step's synchronisation has ended.
        weights: sums the weights of all ranks.
        by_hand: whether the script averages the gradients itself.
        sync: takes the place of the engine's averaging; ``None`` where the engine does it.
        convention: looks at the first loss; ``None`` if none is to be looked at.
        noise: measures gradients; ``None`` where it is not asked for.
        add_up: adds up all ranks' gradients before a step is committed, where no engine does.
    """

    def __init__(
        self,
        world_size: int,
        clock: RankClock,
        watched: WatchedModels,
        batch: BatchInHand,
        limits: MicroBatchLimits,
        commit: Callable[[Draw], None],
        weights: WeightExchange,
        *,
        by_hand: bool = False,
        sync: Synchroniser | None = None,
        convention: Convention | None = None,
        noise: NoiseMeter | None = None,
        add_up: Callable[[Draw], None] | None = None,
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
        """Time spent in our own code on the training thread, in seconds."""
        own_s = self.scaling.own_s + self.backward.own_s
        return own_s if self.noise is None else own_s + self.noise.own_s

    def watch(self, model: nn.Module) -> None:
        """Train one more model."""
        self.watched.add(model)
        self._norms.watch(model)
        self.limits.watch_norms(plain=self._norms.any)

    def begin(self, draw: Draw, weight: float | None) -> None:
        """Take note of a batch handed to the training loop."""
        # First: the hooks of a batch without samples would change the next batch's gradients.
        self.scaling.ghosts.end()
        self._norms.begin(draw)
        if self.noise is not None:
            self.noise.begin(draw)
        self.accumulation.held.clear()
        self.batch.begin(draw, weight)

    def leave(self) -> None:
        """Drop the batch in hand: the loop was left."""
        self.scaling.ghosts.end()
        if self.noise is not None:
            self.noise.pass_ended()
        self.batch.leave()

    def close(self) -> None:
        """Let go of the models, and of what belongs to the process group; see `Channel.close`."""
        self.weights.close()
        self.inner_waits.close()
        self.watched.clear()
