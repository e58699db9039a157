"""What users give to a strategy, apart from Lightning's own options."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.nn.parallel import DistributedDataParallel

from evenstride.errors import ConfigError

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
        cls,
        known: tuple[Sequence[str], type],
        global_batch: Any,
        max_micro_batch: Any,
        options: dict[str, Any],
    ) -> tuple[StrategySettings, dict[str, Any]]:
        """Return the settings, and the options that are left for Lightning.

        ``known`` are the arguments of `Stride`, and the strategy that takes the rest.
        """
        of_stride, base = known
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
        mode = options.get("sync") or os.environ.get("EVENSTRIDE_SYNC") or "bsp"
        if str(mode) != "bsp":
            raise ConfigError(
                f'sync="{mode}" replaces the average of DistributedDataParallel, which this '
                "strategy consists of; leave it out, or write the loop with plain torch and "
                "Stride(sync=...)"
            )
        names = (tuple(of_stride), _OF_LOADER, _OF_WATCH)
        parts = [{name: options[name] for name in some if name in options} for some in names]
        taken = set().union(*parts)
        rest = {name: value for name, value in options.items() if name not in taken}
        _check_names(rest, [*_names(base), *_names(DistributedDataParallel)], sum(names, ()))
        return cls(global_batch, max_micro_batch, *parts), rest

    def of_stride(self) -> dict[str, Any]:
        """Return the arguments of the `Stride`, apart from the global batch."""
        # Lightning's own sampler takes this seed, which `seed_everything` sets.
        return {"seed": int(os.environ.get("PL_GLOBAL_SEED", "0")), **self.stride}


def _names(kind: type) -> tuple[str, ...]:
    return tuple(inspect.signature(kind).parameters)


def _check_names(given: Mapping[str, Any], known: Sequence[str], ours: Sequence[str]) -> None:
    """Raise `ConfigError` for a misspelled option; torch would name it only at the start."""
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, [*ours, *known], n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"there is no option {name!r} of Stride, of its loader or of "
                f"DistributedDataParallel{meant or '; leave it out'}"
            )
