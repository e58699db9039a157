"""What users give to a strategy, apart from Lightning's own options."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from evenstride.errors import ConfigError
from evenstride.runtime.stride import Stride

IN_CHECKPOINT = "evenstride"
"""Key of the position in the data in a checkpoint."""
TESTED = ("2.6", "2.6")
"""The oldest and the newest tested release of Lightning."""

_SET_BY_US = ("process_group", "shard_group", "engine")
_OF_LOADER = ("weight_fn", "cost_fn", "partition", "seeded", "cold_prefetch", "check_data")
_OF_WATCH = ("drift_check", "compress", "check_loss")


@dataclass(frozen=True, slots=True)
class StrategySettings:
    """What the user gave to a strategy, apart from Lightning's own options."""

    global_batch: int | None
    max_micro_batch: int | Literal["batch_size"] | None
    stride: Mapping[str, Any]  # further arguments of `Stride`
    loader: Mapping[str, Any]  # of `Stride.loader`
    watch: Mapping[str, Any]  # of `Stride.watch`

    @classmethod
    def of(
        cls, global_batch: Any, max_micro_batch: Any, options: dict[str, Any]
    ) -> tuple[StrategySettings, dict[str, Any]]:
        """Return the settings, and the options that are left for Lightning."""
        if global_batch is not None and not isinstance(global_batch, int):
            raise ConfigError(
                f"global_batch is {global_batch!r}, but Lightning counts the batches of an epoch "
                "in advance, so it must be a number of samples; leave it out for batch size x "
                "devices x accumulate_grad_batches"
            )
        if max_micro_batch not in (None, "batch_size") and not isinstance(max_micro_batch, int):
            raise ConfigError(
                f"max_micro_batch is {max_micro_batch!r}; give a number of samples, "
                '"batch_size" for that of the DataLoader, or None for the whole share in one batch'
            )
        if given := [name for name in _SET_BY_US if name in options]:
            raise ConfigError(
                f"{given[0]} cannot be set: the strategy creates the process group; leave it out"
            )
        mine = tuple(inspect.signature(Stride).parameters)
        parts = [
            {name: options[name] for name in names if name in options}
            for names in (mine, _OF_LOADER, _OF_WATCH)
        ]
        taken = set().union(*parts)
        rest = {name: value for name, value in options.items() if name not in taken}
        return cls(global_batch, max_micro_batch, *parts), rest

    def begin(self, global_batch: int) -> Stride:
        """Return the `Stride` of this rank; collective."""
        # Lightning's own sampler takes this seed, which `seed_everything` sets.
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        return Stride(global_batch, **{"seed": seed, **self.stride})
