"""What batch norm means for a rank: whose statistics, and what they cannot be made of."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from evenstride.core.sampling.draw import Draw
from evenstride.errors import ConfigError
from evenstride.runtime.batch_norm.norm_layers import batch_norms
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits, tail_spans
from evenstride.runtime.loss.batch_in_hand import BatchInHand
from evenstride.runtime.timing.rank_clock import RankClock

logger = logging.getLogger("evenstride")


class RankContext:
    """What a layer with statistics over all ranks knows of its rank.

    Args:
        group: of the ranks, for these collectives alone; ``None`` with one process.
        batch: in hand.
        clock: of this rank's steps.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        batch: BatchInHand,
        clock: RankClock,
    ) -> None:
        self.group, self.waiting, self._batch = group, clock.waiting, batch

    def close(self) -> None:
        """Let go of the process group; see `Channel.close`."""
        self.group = None

    @property
    def counts(self) -> bool:
        """Whether the batch in hand counts, which that of a rank with a share of 0 does not."""
        draw = self._batch.draw
        return draw is None or draw.samples > 0


class PlainNorms:
    """The layers with statistics of each rank's own batch: two warnings, and a refusal.

    Args:
        world_size: number of ranks.
        fit: tells what shares there may be.
    """

    def __init__(self, world_size: int, fit: MicroBatchLimits) -> None:
        self._world_size, self._fit = world_size, fit
        self._layers: list[nn.Module] = []
        self._refusing: list[RemovableHandle] = []
        self._warned = self._looked_ahead = False

    def watch(self, model: nn.Module) -> None:
        """Know the layers of a model."""
        if self._world_size > 1:
            self._layers += (layer for layer in batch_norms(model) if layer.training)

    @property
    def any(self) -> bool:
        """Whether there are such layers."""
        return bool(self._layers)

    def begin(self, draw: Draw) -> None:
        """Look at the next batch."""
        if not self._layers:
            return
        while self._refusing:
            self._refusing.pop().remove()
        if not self._looked_ahead:
            self._looked_ahead = True
            self._look_ahead(draw.window)
        if draw.samples <= 1:
            self._refusing += (p.register_forward_pre_hook(_refuse_one) for p in self._layers)
        if not self._warned and draw.share * self._world_size != draw.window:
            self._warned = True
            logger.warning(
                "the model has %d batch norm layer(s) with statistics of each rank's own batch, "
                "and from step %d on these batches are unequal (%d of %d samples on this rank), so "
                "the ranks normalise differently and rank 0's running statistics are kept; use "
                "net = stride.sync_batch_norm(net) before wrapping it, group norm, or layer norm",
                len(self._layers),
                draw.step,
                draw.share,
                draw.window,
            )

    def _look_ahead(self, global_batch: int) -> None:
        """Warn if a rank may come to have one sample, of which most BatchNorm1d cannot learn.

        Not a refusal: the loop may end before, and an input may have values beyond the channels.
        """
        spans, tail = self._fit.spans, self._fit.tail
        if not spans or not any(isinstance(layer, nn.BatchNorm1d) for layer in self._layers):
            return
        moving = any(fewest != most for fewest, most in spans)
        in_tail = [fewest for fewest, _ in tail_spans(spans, tail)] if tail else []
        if moving and tail >= 2 * len(spans):  # in proportion, but for rounding
            in_tail = [fewest * tail // global_batch for fewest, _ in spans]
        if min(in_tail, default=2) < 2:
            when = f"the last, short step of an epoch (of {tail} over all ranks)"
        elif moving and min(fewest for fewest, _ in spans) < 2:
            when = "a step"
        else:
            return
        certain = not moving or 0 < tail < 2 * len(spans)
        logger.warning(
            "some rank %s get one sample in %s, and a BatchNorm1d cannot take statistics of one "
            "(unless it has values beyond its channels), which would end the run there; give "
            "each rank at least two with Stride(min_share=2) and loader(drop_last=True), or take "
            "the statistics over all ranks with net = stride.sync_batch_norm(net) before "
            "wrapping it",
            "will" if certain else "may",
            when,
        )


def _refuse_one(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    values = inputs[0] if inputs else None
    if values is not None and layer.training and values.numel() == values.shape[1]:
        raise ConfigError(
            f"a {type(layer).__name__} got one value per channel, as this rank has a batch of one "
            "sample, and a single value has no variance; give each rank at least two samples with "
            "Stride(min_share=2) (and drop_last=True for the tail), or take the statistics over "
            "all ranks with net = stride.sync_batch_norm(net) before wrapping it"
        )
