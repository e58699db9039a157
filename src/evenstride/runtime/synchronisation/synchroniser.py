"""The interface between a training loop and a synchronisation mode.

``bsp``, the default mode, does not use it: the engine (DDP, FSDP2) averages the gradients in the
backward pass. Every other mode turns the engine's own synchronisation off and acts in torch's hooks
around the optimizer's step. The functions at the end refuse what some modes cannot do, above all
collective calls inside the loop.
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
    """Actions of one worker before and after its optimizer's steps."""

    def factor(self, draw: Draw) -> float:
        """Return the factor of a batch's mean loss; 0 for a ghost."""

    def watch(self, module: nn.Module) -> None:
        """Register a trained module; collective."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Act on the gradients of a step's last backward pass, before the optimizer steps.

        If no gradients are left afterwards, the optimizer does nothing.

        Raises:
            WorkerLost: a rank or server that the step needs is gone.
        """

    def after_step(self, optimizer: Optimizer) -> None:
        """Act on the weights after the optimizer's step; the step is committed then.

        Raises:
            WorkerLost: a rank or server that the step needs is gone.
        """

    def close(self, *, in_order: bool) -> None:
        """Disconnect from the other ranks; ``in_order`` after a run without errors. Idempotent."""


def still(model: nn.Module) -> None:
    """Turn off the synchronisation of a model's own engine."""
    engine = engine_of(model)
    if isinstance(engine, DistributedDataParallel):
        # As no_sync() does, but permanently; buffers are not broadcast either.
        engine.require_backward_grad_sync = engine.require_forward_param_sync = False


def begin_alike(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Broadcast rank 0's parameters and buffers; collective. DDP already did so when made."""
    if group is None or isinstance(engine_of(model), DistributedDataParallel):
        return
    source = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, source, group=group)


def require_plain(model: nn.Module, mode: SyncMode) -> None:
    """Refuse a sharded model, whose engine must synchronise by itself."""
    if is_sharded(model):
        raise ConfigError(
            "watch() got a sharded model (FSDP), which synchronises in every pass, but "
            f"sync={str(mode)!r} synchronises at the optimizer's step; use DistributedDataParallel "
            'or the bare module, or sync="bsp"'
        )


def refuse_weights(mode: SyncMode) -> None:
    """Refuse weights other than numbers of samples if the mode counts samples."""
    if isinstance(mode, LocalSgd) or not mode.lockstep:
        raise ConfigError(
            f"weights of batches (weight_fn, or scale(weight=...)) were given with "
            f'sync="{mode}", which weights ranks by their samples; omit the weights, so that each '
            'loss is a mean over samples, or use sync="bsp"'
        )


def check_unaligned_norm(mode: SyncMode) -> None:
    """Refuse batch norm over all ranks if the mode has no steps that all ranks share."""
    if not mode.lockstep:
        raise ConfigError(
            "sync_batch_norm() computes statistics over all ranks of a step, but with "
            f'sync="{mode}" workers share no steps; use group or layer norm instead'
        )


def check_unaligned_mean(mode: SyncMode) -> None:
    """Refuse a mean over all ranks inside the loop, if other ranks may never reach this step.

    Raises:
        LoaderBusy: the mode does not run in lockstep.
    """
    if not mode.lockstep:
        raise LoaderBusy(
            f'mean() waits for all ranks, but with sync="{mode}" they do not run in lockstep, so '
            "some ranks would wait for ever; call it after the loop over an epoch, and log this "
            "rank's own loss inside the loop"
        )
