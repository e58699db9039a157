"""What cannot be in some modes: above all, what all ranks do together inside the loop."""

from __future__ import annotations

from typing import Any

from evenstride.core.sync_modes.mode_specs import LocalSgd, SyncMode
from evenstride.errors import ConfigError, LoaderBusy
from evenstride.runtime.loading.loader_options import LoaderOptions
from evenstride.runtime.loading.shards import lengths_of


def check_unaligned_loader(
    mode: SyncMode, dataset: Any, asked: LoaderOptions, *, by_cost: bool
) -> None:
    """Refuse ways to deal samples out that need the same steps on all ranks.

    Raises:
        ConfigError: names the one that was asked for.
    """
    if asked.weight_fn is not None:
        refuse_weights(mode)
    if mode.lockstep:
        return
    asked_for = {
        "cost_fn": by_cost,
        'partition="epoch"': asked.by_epoch,
        "Shards": bool(lengths_of(dataset)),
    }
    for what, given in asked_for.items():
        if given:
            raise ConfigError(
                f"{what} deals samples out over all workers of a step, and with "
                f'sync="{mode}" workers have no step in common; leave it out, or use sync="bsp-ps"'
            )


def refuse_weights(mode: SyncMode) -> None:
    """Refuse weights other than numbers of samples.

    Raises:
        ConfigError: the mode counts samples.
    """
    if isinstance(mode, LocalSgd) or not mode.lockstep:
        raise ConfigError(
            f"weights of batches (weight_fn, or scale(weight=...)) were given with "
            f'sync="{mode}", which counts a rank\'s samples; leave them out, so that each loss is '
            'a mean over samples, or use sync="bsp"'
        )


def check_unaligned_norm(mode: SyncMode) -> None:
    """Refuse batch norm over all ranks.

    Raises:
        ConfigError: the mode has no step in which all ranks would take part.
    """
    if not mode.lockstep:
        raise ConfigError(
            f'sync_batch_norm() has statistics over all ranks of a step, and with sync="{mode}" '
            "workers have no step in common; use group or layer norm instead"
        )


def check_unaligned_mean(mode: SyncMode) -> None:
    """Refuse a mean over all ranks inside the training loop.

    Raises:
        LoaderBusy: the others are not at this step, and may never be.
    """
    if not mode.lockstep:
        raise LoaderBusy(
            f'mean() waits for all ranks, and with sync="{mode}" they do not keep step, so that '
            "some would wait for ever; call it after the loop over an epoch has ended, and log "
            "this rank's own loss inside it"
        )
