"""Strategies for Lightning's Trainer and for Fabric: unequal batches, exact gradients.

`EvenStrategy` replaces the training loader of a Trainer, weights the loss between ``training_step``
and the backward pass, and keeps the position in the data in checkpoints. A share that is larger
than the user's batch comes as several micro-batches. A Trainer counts batches and broadcasts from
rank 0 with each, so it would hang if the ranks had different numbers of them. Therefore one batch
of the Trainer is one step of the `Stride`: the Trainer fetches its first micro-batch, and the
strategy runs the others inside the backward call, where no code of Lightning communicates.

`EvenFabricStrategy` serves loops that run every batch themselves. See docs/how-to/lightning.md.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstride.errors import ConfigError, UsageError
from evenstride.integrations.lightning_parts.step_loader import (
    MEANS,
    StepLoader,
    StepLogs,
    op_name,
)
from evenstride.integrations.lightning_parts.step_sync import StepSync
from evenstride.integrations.lightning_parts.strategy_settings import (
    IN_CHECKPOINT,
    TESTED,
    StrategySettings,
)
from evenstride.integrations.lightning_parts.trainer_checks import (
    check_device,
    check_optimizers,
    check_trainer,
    several_loaders,
)
from evenstride.integrations.lightning_parts.user_loaders import (
    GivenLoader,
    evaluation_loader,
    map_style,
)
from evenstride.integrations.versions import warn_if_untested
from evenstride.runtime.stride import Stride

__all__ = ["EvenFabricStrategy", "EvenStrategy"]

logger = logging.getLogger("evenstride")
_STRIDE = tuple(inspect.signature(Stride).parameters)


class EvenStrategy(DDPStrategy):  # type: ignore[misc]  # Lightning's types are not read
    """Lightning's DDP, with a batch for each device by its speed, and exact gradients.

    ``Trainer(strategy=EvenStrategy())`` is all that changes. `Stride` describes how shares are
    chosen.

    Each device gets a share of the global batch. A share that is larger than ``max_micro_batch``
    comes as several micro-batches of one step: ``training_step`` runs once for each, the callbacks
    and hooks of a batch once for all. One batch of the Trainer is one optimizer step, also with
    ``accumulate_grad_batches``, which then multiplies the global batch.

    Evaluation loaders give each sample once over all ranks, without padding.

    Args:
        global_batch: Samples per optimizer step over all devices. ``None`` means the batch size of
            the training loader times the devices times ``accumulate_grad_batches``, or what the
            checkpoint has that ``fit`` resumes from.
        max_micro_batch: Most samples that ``training_step`` gets at once. ``"batch_size"`` means
            the batch size of the training loader; with manual optimization or ``sync_batchnorm``,
            whose ranks need equal numbers of batches, it means ``None``. ``None`` gives the whole
            share in one batch.
        **options: Arguments of `Stride` (``policy``, ``seed``, ``trace``, ``max_share``, ...), of
            `Stride.loader` (``weight_fn``, ``cost_fn``, ``partition``, ``seeded``,
            ``cold_prefetch``, ``check_data``) and of `Stride.watch` (``drift_check``,
            ``compress``, ``check_loss``). Any other one is an option of Lightning's
            ``DDPStrategy``, such as ``find_unused_parameters``.

    Raises:
        ConfigError: An argument is invalid; and at the start of ``fit``, on every rank: the
            Trainer, its callbacks, the module or a loader ask for something that unequal batches
            do not allow.

    Cost:
        A few calls per step, without copies.

    Example:
        >>> from evenstride.integrations.lightning import EvenStrategy
        >>> strategy = EvenStrategy(policy="adaptive", find_unused_parameters=True)
        >>> strategy.stride is None
        True
    """

    def __init__(
        self,
        global_batch: int | None = None,
        *,
        max_micro_batch: int | Literal["batch_size"] | None = "batch_size",
        **options: Any,
    ) -> None:
        warn_if_untested("lightning", *TESTED)
        self._settings, rest = StrategySettings.of(
            (_STRIDE, DDPStrategy), global_batch, max_micro_batch, options
        )
        super().__init__(**rest)
        self._stride: Stride | None = None
        self._steps: StepLoader | None = None
        self._restored: dict[str, Any] | None = None
        self._logs, self._in_step, self._in_pieces = StepLogs(), False, False
        self._held = contextlib.ExitStack()
        self._continuing = False  # whether another micro-batch of the step runs
        self._loss: Any = None  # as ``training_step`` returned it
        self._more: tuple[Any, ...] = ()  # what ``training_step`` got besides the batch
        self._undo = contextlib.ExitStack()  # changes of the Trainer, until the end of a run

    @property
    def stride(self) -> Stride | None:
        """The `Stride` of this rank; ``None`` before ``fit`` has read the training loader."""
        return self._stride

    # The life of a run, in the order of Lightning's calls.

    def setup_environment(self) -> None:
        trainer = self._trainer
        if trainer.state.fn == TrainerFn.FITTING:
            check_trainer(trainer)
            self._stride = self._steps = self._restored = None
        if trainer.state.fn != TrainerFn.PREDICTING:
            # Lightning would replace the sampler. For predictions it does so without padding.
            self._change(trainer._accelerator_connector, "use_distributed_sampler", False)
        super().setup_environment()
        check_device(self.root_device)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._restore(checkpoint)
        return checkpoint

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            # Validation may run first, and its split comes from the Stride.
            trainer.fit_loop.setup_data()
            check_optimizers(self.optimizers)
            if self._steps is not None and trainer.train_dataloader is not self._steps:
                raise several_loaders()

    def process_dataloader(self, dataloader: Any) -> Any:
        trainer = self._trainer
        if trainer.training:
            return self._training_loader(dataloader)
        if trainer.predicting or self.world_size == 1 or not map_style(dataloader):
            return dataloader
        return evaluation_loader(dataloader, self.global_rank, self.world_size, self._shares)

    def on_train_start(self) -> None:
        super().on_train_start()
        self._count_steps()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        stride = self._stride
        if stride is None:
            return super().training_step(*args, **kwargs)
        self._logs.batch_begins(first=not self._continuing)
        with contextlib.ExitStack() as held:
            if self.lightning_module.automatic_optimization:
                held.enter_context(stride.accumulate(self.model))
            self._in_step = True
            try:
                output = super().training_step(*args, **kwargs)
            finally:
                self._in_step = False
            self._held = held.pop_all()  # until the end of the backward pass
        self._loss = output.get("loss") if isinstance(output, Mapping) else output
        self._more = args[1:]
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        stride = self._stride
        if stride is None or not self._trainer.training:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        if not self.lightning_module.automatic_optimization:
            return super().backward(stride.scale(closure_loss), optimizer, *args, **kwargs)
        with self._held:
            # Not the closure's loss: it went through a division that hides its reduction.
            result = super().backward(stride.scale(self._loss), optimizer, *args, **kwargs)
        while not self._continuing and not stride.synced:
            self._run_another(optimizer)
        return result

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        if self._stride is not None and self.lightning_module.automatic_optimization:
            # The optimizer calls its hooks before the closure, which must find a finished step.
            result = closure()
            return super().optimizer_step(optimizer, lambda: result, model, **kwargs)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if self._stride is not None and "optimizer_states" in checkpoint:
            checkpoint[IN_CHECKPOINT] = self._stride.state_dict()
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def teardown(self) -> None:
        self._held.close()
        self._undo.close()
        if self._steps is not None:
            self._steps.close()
        if self._stride is not None:
            self._stride.close()
        super().teardown()

    # Communication of the user's hooks.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        op = op_name(reduce_op)
        stride, reduce = self._stride, super().reduce
        if isinstance(tensor, Tensor) and self._in_step and stride is not None:

            def over_ranks(value: Tensor, name: str) -> Any:
                with stride.waiting():  # otherwise a fast rank's wait would look like work
                    return reduce(value, group, name)

            last = over_ranks if stride.synced else None
            return self._logs.reduced(tensor, op, stride.samples, last)
        if isinstance(tensor, Tensor) and op in MEANS and not tensor.is_floating_point():
            tensor = tensor.double()  # Lightning would round the mean of unequal batch sizes
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_in_pieces("all_gather")
        return super().all_gather(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_in_pieces("broadcast")
        return super().broadcast(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._refuse_in_pieces("barrier")
        super().barrier(*args, **kwargs)

    def _refuse_in_pieces(self, what: str) -> None:
        if self._in_step and self._in_pieces:
            raise UsageError(
                f"training_step called {what}(), but the ranks may run it for different numbers "
                "of micro-batches and would wait for each other forever; give each rank its share "
                "in one batch with EvenStrategy(max_micro_batch=None), or call it in another hook"
            )

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer

    def _shares(self) -> Sequence[int]:
        return () if self._stride is None else self._stride.shares

    def _change(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of the Trainer until the end of the run."""
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def _training_loader(self, dataloader: Any) -> StepLoader:
        trainer, again = self._trainer, self._steps is not None
        given = GivenLoader.of(dataloader, "training")
        if self._steps is not None:
            self._steps.close()
            if trainer.fit_loop._combined_loader is None:  # not for another epoch
                if given.dataset is self._steps.dataset:
                    return self._steps  # after a search for the learning rate
                raise several_loaders()
        stride = self._stride or self._begin(given, trainer.accumulate_grad_batches)
        loader = stride.loader(
            given.dataset,
            shuffle=given.shuffle,
            drop_last=given.drop_last,
            max_micro_batch=self._most(given),
            **self._settings.loader,
            **given.options,
        )
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        self._steps = StepLoader(loader, given.dataset, lambda: progress.ready == 0)
        if not again:
            self._steps.count(trainer.accumulate_grad_batches)
            stride.watch(self.model, **self._settings.watch)
        return self._steps

    def _begin(self, given: GivenLoader, accumulated: int) -> Stride:
        usual = given.batch_size * self.world_size * accumulated
        saved = None if self._restored is None else self._restored["global_batch"]
        self._stride = Stride(
            self._settings.global_batch or saved or usual, **self._settings.of_stride()
        )
        if self._restored is not None:
            self._stride.load_state_dict(self._restored)
            if self._settings.global_batch is None and saved != usual and self.global_rank == 0:
                logger.warning(
                    "the global batch stays at %d samples, that of the checkpoint; batch size x "
                    "devices x accumulate_grad_batches is now %d",
                    saved,
                    usual,
                )
        return self._stride

    def _most(self, given: GivenLoader) -> int | None:
        """Return the samples of the largest micro-batch."""
        most = self._settings.max_micro_batch
        whole = not self.lightning_module.automatic_optimization or self._layer_sync is not None
        if whole and isinstance(most, int):
            raise ConfigError(
                f"max_micro_batch={most} would run training_step for different numbers of "
                "micro-batches on the ranks, but manual optimization steps in each, and "
                "sync_batchnorm communicates in each; leave max_micro_batch out"
            )
        if most == "batch_size":
            most = None if whole else given.batch_size
        self._in_pieces = most is not None and self.world_size > 1
        return most

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        self._restored = checkpoint.get(IN_CHECKPOINT)
        if self._restored is None:
            if self.global_rank == 0:
                logger.warning(
                    "the checkpoint has no position in the data, because it was written without "
                    "EvenStrategy or with save_weights_only=True; the samples come in the order of "
                    "the first epoch again"
                )
        elif self._stride is not None and self._steps is not None:  # during a run
            self._steps.close()
            self._stride.load_state_dict(self._restored)

    def _count_steps(self) -> None:
        """Let the Trainer count a step as one batch; until now ``accumulate_grad_batches``."""
        trainer, steps = self._trainer, self._steps
        if steps is None or steps.per_step == 1:
            return
        count = steps.per_step
        steps.count(1)
        loop = trainer.fit_loop
        loop.max_batches = -(-loop.max_batches // count)
        self._change(trainer, "accumulate_grad_batches", 1)
        interval = trainer.val_check_interval
        if isinstance(interval, float):
            trainer.val_check_batch = max(1, int(loop.max_batches * interval))
        elif isinstance(interval, int):
            trainer.val_check_batch = interval // count
        iter(loop._data_fetcher)  # it knows when an epoch ends

    def _run_another(self, optimizer: Any) -> None:
        """Run the next micro-batch of the step, as the Trainer runs its batches."""
        trainer, module, steps = self._trainer, self.lightning_module, self._steps
        assert steps is not None, "a step has a loader"
        batch = trainer.precision_plugin.convert_input(steps.another())
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        trainer._logger_connector.on_batch_start(batch)  # the size of the batch, for `self.log`
        self._continuing = True
        try:
            call._call_strategy_hook(trainer, "training_step", batch, *self._more)
            call._call_strategy_hook(trainer, "backward", self._loss, optimizer)
        finally:
            self._continuing = False


class EvenFabricStrategy(FabricDDPStrategy):  # type: ignore[misc]
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
            (_STRIDE, FabricDDPStrategy), global_batch, max_micro_batch, options
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
        self._stride = Stride(
            self._settings.global_batch or saved or usual, **self._settings.of_stride()
        )
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
