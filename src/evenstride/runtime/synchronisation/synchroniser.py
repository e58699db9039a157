"""The seam between a training loop and how its workers' steps become those of one model.

With ``bsp``, the default, there is nothing in it: the engine (DDP, FSDP2) averages the gradients in
the backward pass. Every other mode leaves the engine's own synchronisation out and acts around the
optimizer's step, of which torch tells.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from evenstride.core.sampling.draw import Draw
from evenstride.core.sync_modes.mode_specs import SyncMode
from evenstride.errors import ConfigError
from evenstride.runtime.engines.forward_timing import engine_of
from evenstride.runtime.engines.fsdp import is_sharded


class Synchroniser(Protocol):
    """What one worker does around its optimizer's steps."""

    def factor(self, draw: Draw) -> float:
        """Return what the mean loss of a batch is multiplied by; 0 for a ghost."""
        ...

    def watch(self, module: nn.Module) -> None:
        """Know a module that is trained; collective."""
        ...

    def before_step(self, optimizer: Optimizer) -> None:
        """Act on the gradients of a step's last backward pass, before the optimizer steps.

        An optimizer that finds no gradients afterwards does nothing.

        Raises:
            WorkerLost: what is needed for it is gone.
        """
        ...

    def after_step(self, optimizer: Optimizer) -> None:
        """Act on the weights that the optimizer has made here; the step is committed then.

        Raises:
            WorkerLost: what is needed for it is gone.
        """
        ...

    def close(self, *, in_order: bool) -> None:
        """Part from the others; in order if all is well. May be called again."""
        ...


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
    """Refuse an engine that must synchronise by itself.

    Raises:
        ConfigError: the model is sharded.
    """
    if is_sharded(model):
        raise ConfigError(
            "watch() got a sharded model (FSDP), whose every pass synchronises, and "
            f"sync={str(mode)!r} does so at the optimizer's step; use DistributedDataParallel or "
            'the bare module, or sync="bsp"'
        )
