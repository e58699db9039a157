"""What of an epoch a rank trains next: one batch as it was drawn."""

from __future__ import annotations

from typing import NamedTuple

from evenstride.core.sampling.shard_assignment import ShardAssignment


class Draw(NamedTuple):
    """One (micro-)batch on its way to the training loop; made for every step, hence a tuple.

    Args:
        step: global index of its step.
        window: samples of the whole step over all ranks.
        share: samples of this rank in the step; 0 for a ghost.
        samples: samples in this micro-batch that count; 0 for a ghost.
        first: first micro-batch of this rank in the step.
        last: last one; its backward pass synchronises.
        dealing: what is left of the shards after its step, for data in shards.
        claimed: the share that it was to be, where workers do not keep step; at the end of an
            epoch there may be fewer samples.
        trained: samples of this rank in the step that count, where workers keep step; other than
            the share where shares are dealt out by cost.
    """

    step: int
    window: int
    share: int
    samples: int
    first: bool
    last: bool
    dealing: ShardAssignment | None = None
    claimed: int = 0
    trained: int = 0
