"""The seam between a training loop and how its workers' steps become those of one model.

With ``bsp``, the default, there is nothing in it: the engine (DDP, FSDP2) averages the gradients in
the backward pass. Every other mode leaves the engine's own synchronisation out and acts around the
optimizer's step, of which torch tells. At the end is what cannot be in some modes: above all, what
all ranks do together inside the loop.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from evenstride.core.sampling.draw import Draw
from evenstride.core.sync_modes.mode_specs import LocalSgd, SyncMode
from evenstride.errors import ConfigError, LoaderBusy
from evenstride.runtime.engines.watched_models import engine_of, is_sharded


class Synchroniser(Protocol):
    """What one worker does around its optimizer's steps."""

    def factor(self, draw: Draw) -> float:
        """Return what the mean loss of a batch is multiplied by; 0 for a ghost."""

    def watch(self, module: nn.Module) -> None:
        """Know a module that is trained; collective."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Act on the gradients of a step's last backward pass, before the optimizer steps.

        An optimizer that finds no gradients afterwards does nothing.

        Raises:
            WorkerLost: what is needed for it is gone.
        """

    def after_step(self, optimizer: Optimizer) -> None:
        """Act on the weights that the optimizer has made here; the step is committed then.

        Raises:
            WorkerLost: what is needed for it is gone.
        """

    def close(self, *, in_order: bool) -> None:
        """Part from the others; in order if all is well. May be called again."""


def still(model: nn.Module) -> None:
    """Let a model's own engine synchronise nothing."""
    engine = engine_of(model)
    if isinstance(engine, DistributedDataParallel):
        # What its no_sync() does, for good; buffers are not broadcast either.
        engine.require_backward_grad_sync = engine.require_forward_param_sync = False


def begin_alike(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Give every rank rank 0's parameters and buffers; collective. DDP has done so when made."""
    if group is None or isinstance(engine_of(model), DistributedDataParallel):
        return
    source = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, source, group=group)


def require_plain(model: nn.Module, mode: SyncMode) -> None:
    """Refuse a sharded model, which must synchronise by itself."""
    if is_sharded(model):
        raise ConfigError(
            "watch() got a sharded model (FSDP), whose every pass synchronises, and "
            f"sync={str(mode)!r} does so at the optimizer's step; use DistributedDataParallel or "
            'the bare module, or sync="bsp"'
        )


def refuse_weights(mode: SyncMode) -> None:
    """Refuse weights other than numbers of samples where the mode counts samples."""
    if isinstance(mode, LocalSgd) or not mode.lockstep:
        raise ConfigError(
            f"weights of batches (weight_fn, or scale(weight=...)) were given with "
            f'sync="{mode}", which counts a rank\'s samples; leave them out, so that each loss is '
            'a mean over samples, or use sync="bsp"'
        )


def check_unaligned_norm(mode: SyncMode) -> None:
    """Refuse batch norm over all ranks where the mode has no step in which all would take part."""
    if not mode.lockstep:
        raise ConfigError(
            f'sync_batch_norm() has statistics over all ranks of a step, and with sync="{mode}" '
            "workers have no step in common; use group or layer norm instead"
        )


def check_unaligned_mean(mode: SyncMode) -> None:
    """Refuse a mean over all ranks inside the loop where the others may never be at this step.

    Raises:
        LoaderBusy: it is called there.
    """
    if not mode.lockstep:
        raise LoaderBusy(
            f'mean() waits for all ranks, and with sync="{mode}" they do not keep step, so that '
            "some would wait for ever; call it after the loop over an epoch has ended, and log "
            "this rank's own loss inside it"
        )
