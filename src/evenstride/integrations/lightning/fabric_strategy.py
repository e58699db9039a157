"""A strategy for Fabric, whose loops run every batch themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstride.errors import ConfigError, UsageError
from evenstride.integrations.lightning.strategy_settings import (
    IN_CHECKPOINT,
    TESTED,
    StrategySettings,
)
from evenstride.integrations.lightning.trainer_checks import check_device
from evenstride.integrations.lightning.user_loaders import (
    GivenLoader,
    evaluation_loader,
    map_style,
)
from evenstride.integrations.versions import warn_if_untested
from evenstride.runtime.stride import Stride


class EvenFabricStrategy(DDPStrategy):  # type: ignore[misc]
    """Fabric's DDP, with a batch for each device by its speed, and exact gradients.

    ``Fabric(strategy=EvenFabricStrategy())`` is all that changes. The first loader that
    ``setup_dataloaders`` gets is for training, and is split by speed. The others are for
    evaluation: each sample once over all ranks, without padding. ``fabric.backward`` weights the
    loss.

    If the state has an optimizer, ``fabric.save`` also stores the position in the data, and
    ``fabric.load`` restores it.

    Args:
        global_batch: Samples per batch of the loop over all devices; ``None`` for the batch size of
            the training loader times the devices. A loop that accumulates ``k`` batches takes ``k``
            of them per optimizer step.
        max_micro_batch: Most samples of a batch; ``None`` for the whole share. With a number, a
            share comes as several batches, and the ranks have different numbers of them: the loop
            must use ``fabric.strategy.stride.synced``, see the page on Lightning.
        **options: Arguments of `Stride`, `Stride.loader` and `Stride.watch`, and options of
            Fabric's ``DDPStrategy``; see `EvenStrategy`.

    Raises:
        ConfigError: An argument is invalid; or in ``setup_dataloaders``, on every rank: a loader
            draws samples in a way of its own.
    """

    def __init__(
        self,
        global_batch: int | None = None,
        *,
        max_micro_batch: int | None = None,
        **options: Any,
    ) -> None:
        warn_if_untested("lightning", *TESTED)
        self._settings, rest = StrategySettings.of(
            DDPStrategy, global_batch, max_micro_batch, options
        )
        super().__init__(**rest)
        self._most = max_micro_batch
        self._stride: Stride | None = None
        self._models: list[nn.Module] = []
        self._restored: dict[str, Any] | None = None  # the position in a checkpoint
        plain = self._backward_sync_control  # type: ignore[has-type]
        self._backward_sync_control = StepSync(plain, self._pieces)

    @property
    def stride(self) -> Stride | None:
        """The `Stride` of this rank; ``None`` before ``setup_dataloaders``."""
        return self._stride

    @property
    def distributed_sampler_kwargs(self) -> None:
        """Fabric replaces no sampler if this is ``None``."""

    def setup_environment(self) -> None:
        super().setup_environment()
        check_device(self.root_device)

    def setup_module(self, module: nn.Module) -> Any:
        model = super().setup_module(module)
        self._models.append(model)
        if self._stride is not None:
            self._stride.watch(model, **self._settings.watch)
        return model

    def process_dataloader(self, dataloader: Any) -> Any:
        if self._stride is None:
            return self._training_loader(GivenLoader.of(dataloader, "training"))
        if not map_style(dataloader):
            return dataloader
        if GivenLoader.of(dataloader, "evaluation").shuffle:
            raise ConfigError(
                "a DataLoader with shuffle=True was set up after the first one, which is the "
                "training loader; set up the training loader first, and give evaluation loaders "
                "shuffle=False"
            )
        if self.world_size == 1:
            return dataloader
        return evaluation_loader(dataloader, self.global_rank, self.world_size, self._shares)

    def backward(self, tensor: Tensor, module: Any = None, *args: Any, **kwargs: Any) -> None:
        if self._stride is None:
            raise UsageError(
                "fabric.backward() was called, but no training loader was set up, so the loss "
                "cannot be weighted; give the DataLoader to fabric.setup_dataloaders first"
            )
        super().backward(self._stride.scale(tensor), module, *args, **kwargs)

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        # A file without an optimizer is for its weights, and may be read key by key.
        resumable = any(isinstance(value, Optimizer) for value in state.values())
        if self._stride is not None and resumable:
            state = {**state, IN_CHECKPOINT: self._stride.state_dict()}
        super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(
        self, path: Any, state: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        if state is not None and IN_CHECKPOINT in rest:
            self._restored = rest.pop(IN_CHECKPOINT)
            if self._stride is not None:
                self._stride.load_state_dict(self._restored)
        return rest

    def _training_loader(self, given: GivenLoader) -> Any:
        saved = None if self._restored is None else self._restored["global_batch"]
        usual = given.batch_size * self.world_size
        self._stride = self._settings.begin(self._settings.global_batch or saved or usual)
        if self._restored is not None:
            self._stride.load_state_dict(self._restored)
        loader = self._stride.loader(
            given.dataset,
            shuffle=given.shuffle,
            drop_last=given.drop_last,
            max_micro_batch=self._most,
            **self._settings.loader,
            **given.options,
        )
        for model in self._models:
            self._stride.watch(model, **self._settings.watch)
        return loader

    def _shares(self) -> Sequence[int]:
        return () if self._stride is None else self._stride.shares

    def _pieces(self) -> Stride | None:
        return self._stride if self._most is not None else None


class StepSync(_BackwardSyncControl):  # type: ignore[misc]
    """``fabric.no_backward_sync``, also for ranks with different numbers of micro-batches."""

    def __init__(self, plain: Any, pieces: Callable[[], Stride | None]) -> None:
        self._plain, self._pieces = plain, pieces

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Any:
        """Return the context; raise `UsageError` where ranks would average different steps."""
        stride = self._pieces()
        if stride is None:
            return self._plain.no_backward_sync(module, enabled)
        if enabled == stride.synced:
            raise UsageError(
                f"no_backward_sync(enabled={enabled}) in a batch with synced={stride.synced}: the "
                "ranks have different numbers of micro-batches, so the loop must not count them; "
                "use enabled=not fabric.strategy.stride.synced"
            )
        return stride.accumulate(module)
