"""The interface between a training loop and the synchronisation of its workers.

With ``bsp``, the default, it is not used: the engine (DDP, FSDP2) averages the gradients in the
backward pass. Every other mode disables the engine's own synchronisation and acts before and after
the optimizer's step, by torch's hooks. The functions at the end refuse calls that some modes do not
support, mainly collective calls inside the loop.
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
    """A worker's synchronisation around the steps of its optimizers."""

    def factor(self, draw: Draw) -> float:
        """Return the factor for the mean loss of a batch; 0 for a ghost."""

    def watch(self, module: nn.Module) -> None:
        """Register a module that is trained; collective."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Process the gradients of a step's last backward pass, before the optimizer steps.

        If it removes the gradients, the optimizer does nothing.

        Raises:
            WorkerLost: a worker or server that it needs is lost.
        """

    def after_step(self, optimizer: Optimizer) -> None:
        """Process the weights after the local optimizer step; the step is committed then.

        Raises:
            WorkerLost: a worker or server that it needs is lost.
        """

    def close(self, *, in_order: bool) -> None:
        """Leave the other ranks; ``in_order`` without an error. May be called again."""


def still(model: nn.Module) -> None:
    """Disable the synchronisation of a model's own engine."""
    engine = engine_of(model)
    if isinstance(engine, DistributedDataParallel):
        # A permanent no_sync(); buffers are not broadcast either.
        engine.require_backward_grad_sync = engine.require_forward_param_sync = False


def begin_alike(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Broadcast rank 0's parameters and buffers; collective. DDP has done so at its creation."""
    if group is None or isinstance(engine_of(model), DistributedDataParallel):
        return
    source = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, source, group=group)


def require_plain(model: nn.Module, mode: SyncMode) -> None:
    """Refuse a sharded model, which must synchronise in its passes."""
    if is_sharded(model):
        raise ConfigError(
            "watch() got a sharded model (FSDP), which synchronises in each pass, but "
            f"sync={str(mode)!r} synchronises at the optimizer's step; use "
            'DistributedDataParallel or the bare module, or sync="bsp"'
        )


def refuse_weights(mode: SyncMode) -> None:
    """Refuse batch weights in modes that count samples."""
    if isinstance(mode, LocalSgd) or not mode.lockstep:
        raise ConfigError(
            f'sync="{mode}" counts a rank\'s samples, so it does not support weights of batches '
            "(weight_fn, or scale(weight=...)); remove them, so that each loss is a mean over "
            'samples, or use sync="bsp"'
        )


def check_unaligned_norm(mode: SyncMode) -> None:
    """Refuse batch norm over all ranks in modes without common steps."""
    if not mode.lockstep:
        raise ConfigError(
            "sync_batch_norm() computes statistics over all ranks of a step, but with "
            f'sync="{mode}" the workers have no common steps; use group norm or layer norm'
        )


def check_unaligned_mean(mode: SyncMode) -> None:
    """Refuse a mean over all ranks inside the loop in modes without common steps.

    Raises:
        LoaderBusy: it is called inside the loop.
    """
    if not mode.lockstep:
        raise LoaderBusy(
            f'mean() waits for all ranks, but with sync="{mode}" they make different numbers of '
            "steps, so some would wait forever; call it after the loop over an epoch, and log only "
            "this rank's own loss inside the loop"
        )
