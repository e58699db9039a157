"""What of an epoch a rank trains next: one batch as it was drawn."""

from __future__ import annotations

from typing import NamedTuple

from evenstride.core.sampling.shard_assignment import ShardAssignment


class Draw(NamedTuple):
    """One (micro-)batch on its way to the training loop; made for every step, hence a tuple."""

    step: int  # global index of its step
    window: int  # samples of the whole step over all ranks
    share: int  # samples of this rank in the step; 0 for a ghost
    samples: int  # samples in this micro-batch that count; 0 for a ghost
    first: bool  # first micro-batch of this rank in the step
    last: bool  # last one; its backward pass synchronises
    # What is left of the shards after its step, for data in shards.
    dealing: ShardAssignment | None = None
    # The share that it was to be, where workers do not keep step; at the end of an epoch there may
    # be fewer samples.
    claimed: int = 0
    # Samples of this rank in the step that count, where workers keep step; other than the share
    # where shares are dealt out by cost.
    trained: int = 0
