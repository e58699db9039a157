"""What a Trainer, its callbacks or its module may not ask for; refused on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from evenstride.errors import ConfigError


def several_loaders() -> ConfigError:
    return ConfigError(
        "there are several training loaders, or one in a collection (CombinedLoader), but a step "
        "has one global batch; give one DataLoader, whose data set returns what belongs together"
    )


def check_device(device: torch.device) -> None:
    """Raise `ConfigError` for devices whose gradients DDP does not average."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f'EvenStrategy trains on CPU and CUDA devices, not on "{device.type}"; use '
            'accelerator="cpu" or "gpu"'
        )


def check_optimizers(optimizers: Sequence[Any]) -> None:
    """Raise `ConfigError` for an optimizer that runs its closure several times."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "LBFGS runs training_step several times for one batch, each with an average over "
                "the ranks that counts as a step; use an optimizer that needs one gradient per step"
            )


def check_trainer(trainer: Any) -> None:
    """Raise `ConfigError` for options of a Trainer that do not go with unequal batches."""
    module, count = trainer.lightning_module, trainer.accumulate_grad_batches
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ConfigError(
            "training_step(dataloader_iter) fetches batches itself, so the strategy does not know "
            "which loss belongs to which batch; use training_step(batch, batch_idx)"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler | StochasticWeightAveraging):
            raise ConfigError(
                f"{type(callback).__name__} changes the number of batches per step during the "
                "run, but the global batch is fixed; use accumulate_grad_batches=, and "
                "torch.optim.swa_utils or WeightAveraging for averaged weights"
            )
    if count > 1 and trainer.reload_dataloaders_every_n_epochs:
        raise ConfigError(
            "reload_dataloaders_every_n_epochs counts the batches of an epoch again, but with "
            f"accumulate_grad_batches={count} a batch is a whole step by then; set "
            "accumulate_grad_batches=1 and EvenStrategy(global_batch=...)"
        )
    interval = trainer.val_check_interval
    if isinstance(interval, int) and interval % count:
        raise ConfigError(
            f"val_check_interval={interval} ends within a step of accumulate_grad_batches={count} "
            "batches; give a multiple of it"
        )
