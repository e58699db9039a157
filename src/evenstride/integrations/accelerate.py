"""`EvenAccelerator` in place of Hugging Face Accelerate's `Accelerator`, in an unchanged script.

Every process gets as many batches as with Accelerate, but of its own size: the batches of an update
are parts of one global batch. So counters of batches, `len(loader)`, progress bars and collectives
in the loop stay right. Micro-batches of one size, in different numbers, would not allow that.

Accelerate wraps the model, places tensors, and handles precision, saving and trackers. This module
replaces what assumes equal batches: the loaders, the weight of a loss, the pace of schedulers, and
the gathering of metrics. See docs/how-to/accelerate.md.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    gather_object,
    is_lomo_available,
    recursively_apply,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, SequentialSampler

from evenstride.errors import ConfigError, UsageError
from evenstride.integrations.accelerate_parts.even_batches import EvalBatches, Mover, TrainBatches
from evenstride.integrations.accelerate_parts.even_scheduler import EvenScheduler, SchedulePace
from evenstride.integrations.accelerate_parts.saved_position import SavedPosition
from evenstride.integrations.accelerate_parts.setup_rules import (
    evaluates_evenly,
    options_of,
    refuse_order,
    refuse_plugins,
    refuse_setup,
    training_loader,
    unprepared,
)
from evenstride.integrations.versions import warn_if_untested
from evenstride.runtime.engines.watched_models import averages
from evenstride.runtime.loading.evaluation import EvalLoader
from evenstride.runtime.loading.loader import TrainLoader
from evenstride.runtime.settings import averages as by_all_reduce
from evenstride.runtime.stride import Stride

__all__ = ["EvenAccelerator"]

_STRIDE = inspect.signature(Stride).parameters.keys() - {"global_batch", "engine", "process_group"}
_LOADER = {"weight_fn", "seeded", "cold_prefetch", "check_data"}


class EvenAccelerator(Accelerator):  # type: ignore[misc]
    """Accelerate's `Accelerator` with batches of unequal size and the exact gradient.

    The training loader is the one in `prepare` that does not keep the order of its data set; if all
    do, the first one that is given with an optimizer. The global batch is ``batch_size`` times
    ``gradient_accumulation_steps`` times the number of processes, as it was. Each process gets
    ``gradient_accumulation_steps`` batches per update, which together are its share. `save_state`
    and `load_state` include the position in the data, also within an epoch and with any number of
    processes.

    Args:
        *args: Arguments of `Accelerator`.
        global_batch: Samples per update over all processes. ``None`` is the product above, or
            without the processes if ``split_batches`` is set. Give a number (or set
            ``split_batches``) for runs that continue with another number of processes.
        sync_batch_norm: Whether `prepare` gives batch norm layers the statistics of all processes'
            samples; see `Stride.sync_batch_norm`. Each layer then costs two collectives per batch.
        **options: Keyword arguments of `Accelerator` and `Stride`, and ``weight_fn``, ``seeded``,
            ``cold_prefetch`` and ``check_data`` of `Stride.loader`.

    Raises:
        ConfigError: A plugin or a setting cannot be combined with unequal batches: DeepSpeed,
            Megatron-LM, FSDP version 1, TPUs, ``dispatch_batches``, tensor and context parallelism.

    Example:
        >>> import torch
        >>> from evenstride.integrations.accelerate import EvenAccelerator
        >>> accelerator = EvenAccelerator(cpu=True)
        >>> net = torch.nn.Linear(1, 1)
        >>> data = torch.utils.data.TensorDataset(torch.arange(8.0).reshape(8, 1))
        >>> model, optimizer, loader = accelerator.prepare(
        ...     net,
        ...     torch.optim.SGD(net.parameters(), lr=0.01),
        ...     torch.utils.data.DataLoader(data, batch_size=4, shuffle=True),
        ... )
        >>> for (x,) in loader:
        ...     accelerator.backward(model(x).square().mean())
        ...     optimizer.step(); optimizer.zero_grad()
        >>> accelerator.stride.epoch
        1
        >>> _ = accelerator.free_memory()
    """

    def __init__(
        self,
        *args: Any,
        global_batch: int | Literal["auto"] | None = None,
        sync_batch_norm: bool = False,
        **options: Any,
    ) -> None:
        self._stride_options = {name: options.pop(name) for name in _STRIDE & options.keys()}
        self._loader_options = {name: options.pop(name) for name in _LOADER & options.keys()}
        self._stride: Stride | None = None
        self._train: TrainBatches | None = None
        self._global_batch, self._accumulating = global_batch, False
        self._sync_batch_norm = sync_batch_norm
        self._trained: list[nn.Module] = []  # prepared models that are trained
        self._watched: list[nn.Module] = []
        refuse_plugins(inspect.signature(Accelerator).bind_partial(*args, **options).arguments)
        super().__init__(*args, **options)
        if self.is_main_process:
            warn_if_untested("accelerate", "1.15", "1.15")
        refuse_setup(self)
        self._pace = SchedulePace(split=self.split_batches)
        self._position = SavedPosition()
        self.register_save_state_pre_hook(self._position.save)
        self.register_load_state_pre_hook(self._position.load)

    @property
    def stride(self) -> Stride:
        """The `Stride` of this process, once a training loader is prepared."""
        if self._stride is None:
            raise UsageError(
                "there is no Stride yet, because no training loader was prepared; give one to "
                "accelerator.prepare()"
            )
        return self._stride

    @property
    def scheduler_steps_per_update(self) -> Fraction:
        """Steps of a prepared scheduler per update: global batch / (batch size * accumulation)."""
        return self._pace.value

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers; see `Accelerator.prepare`.

        Raises:
            ConfigError: Which loader is for training is not clear, or it cannot be carried over:
                its data set has no length, or it has a sampler of its own.
        """
        self._refuse_retries()
        loaders = [one for one in args if unprepared(one)]
        optimizes = any(isinstance(one, Optimizer) for one in args)
        chosen = training_loader(loaders, optimizes=optimizes, known=self._train is not None)
        if chosen is not None:
            self._begin(chosen)
        self._chosen, self._preparing = chosen, True
        try:
            result = super().prepare(*args, device_placement=device_placement)
        finally:
            self._chosen, self._preparing = None, False
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, nn.Module):
                self._note(one)
        self._watch()
        return result

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
        *,
        train: bool | None = None,
    ) -> Any:
        """Prepare one loader; see `Accelerator.prepare_data_loader`.

        Args:
            data_loader: A `DataLoader`, the same on every process.
            device_placement: Whether to move batches to the device.
            slice_fn_for_dispatch: As in Accelerate.
            train: Whether the loader is for training. ``None`` tells by its order.

        Returns:
            For training, and for evaluation in the order of the data set, a loader with batches of
            unequal size. Any other evaluation loader is prepared by Accelerate alone.
        """
        if not unprepared(data_loader):
            return super().prepare_data_loader(data_loader)
        if train is None:
            train = data_loader is self._chosen or (
                self._chosen is None
                and training_loader([data_loader], optimizes=False, known=self._train is not None)
                is not None
            )
        place = self.device_placement if device_placement is None else device_placement
        device = self.device if place else None
        prepared: Any
        if train:
            prepared = self._training(data_loader, device)
        elif self._stride is not None and evaluates_evenly(data_loader):
            prepared = self._evaluation(data_loader, device)
        else:
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        prepared._is_accelerate_prepared = True
        self._dataloaders.append(prepared)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare one model; see `Accelerator.prepare_model`."""
        if self._sync_batch_norm and not evaluation_mode:
            self.stride.sync_batch_norm(model)
        # Modes without an engine synchronise at the optimizer's step, so nothing is to wrap.
        bare = evaluation_mode or not self._engine_averages
        model = super().prepare_model(model, device_placement, bare)
        if not evaluation_mode:
            self._note(model)
            if not self._preparing:
                self._watch()
        return model

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare one optimizer; see `Accelerator.prepare_optimizer`."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if is_lomo_available() and self.has_lomo_optimizer:
            raise ConfigError(
                "LOMO optimizers update weights within the backward pass, before the gradients of "
                "all processes are averaged by sample; use another optimizer"
            )
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> EvenScheduler:
        """Prepare one scheduler; see `Accelerator.prepare_scheduler`."""
        made = super().prepare_scheduler(scheduler)
        if isinstance(made, EvenScheduler):
            return made
        even = EvenScheduler(
            made.scheduler, made.optimizers, made.step_with_optimizer, made.split_batches
        )
        even.pace = self._pace
        self._schedulers[self._schedulers.index(made)] = even
        return even

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Postpone the average over the processes to the last batch of the update."""
        if self._stride is None:
            with super().accumulate(*models):
                yield
            return
        with contextlib.ExitStack() as stack:
            given = [one for one in models if any(one is known for known in self._watched)]
            for model in given or self._watched:
                stack.enter_context(self._stride.accumulate(model))
            self._accumulating = True
            try:
                yield
            finally:
                self._accumulating = False

    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | Tensor | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        **kwargs: Any,
    ) -> None:
        """Weight the loss by its samples and run the backward pass.

        The loss is not divided by ``gradient_accumulation_steps``: its weight is its part of the
        global batch.

        Args:
            loss: Mean over this batch, of one element.
            weight: See `Stride.scale`.
            reduction: See `Stride.scale`.
            **kwargs: Arguments of `Tensor.backward`.

        Raises:
            ScaleError: The loss was scaled before, or is not of a training batch.
            UsageError: ``gradient_accumulation_steps`` is set, but the loop does not use
                `accumulate`.
        """
        if self._stride is None:
            super().backward(loss, **kwargs)
            return
        if self.gradient_accumulation_steps > 1 and not self._accumulating:
            raise UsageError(
                f"gradient_accumulation_steps is {self.gradient_accumulation_steps}, but "
                "backward() was called outside of accelerator.accumulate(), so each batch would be "
                "averaged by itself; put the forward and backward pass into "
                "`with accelerator.accumulate(model):`"
            )
        scaled = self._stride.scale(loss, weight, reduction=reduction)
        if self.scaler is not None:
            scaled = self.scaler.scale(scaled)
        scaled.backward(**kwargs)  # type: ignore[no-untyped-call]

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches per update."""
        return int(self.gradient_state.num_steps)

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if self._stride is not None and steps != self.gradient_accumulation_steps:
            raise ConfigError(
                f"gradient_accumulation_steps={steps} was set after a training loader was prepared "
                f"for {self.gradient_accumulation_steps}; set it before prepare()"
            )
        self.gradient_state.plugin_kwargs.update({"num_steps": steps})

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of distributed training; see `Accelerator`."""
        # Its constructor asks for this first. Later it averages weights, equally over processes.
        if sys._getframe(1).f_globals.get("__name__") == "accelerate.local_sgd":
            self._refuse("LocalSGD", 'EvenAccelerator(sync="local-sgd(every=8)")')
        return self.state.distributed_type

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all processes, also with different numbers of rows."""
        if self.num_processes == 1:
            return super().gather(tensor)
        return recursively_apply(self._gathered, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Concatenate what all processes have for the samples of their batches.

        Each sample of an evaluation counts once, in the order of the data set. What belongs to a
        placeholder batch is left out.
        """
        loader = self.gradient_state.active_dataloader
        if not isinstance(loader, (TrainBatches, EvalBatches)):
            return super().gather_for_metrics(input_data, use_gather_object)
        if self.num_processes == 1:
            return input_data
        if use_gather_object or not _all_tensors(input_data):
            return gather_object([] if loader.empty else input_data)
        rows = 0 if loader.empty else None

        def kept(tensor: Tensor) -> Tensor:
            return (tensor if tensor.ndim else tensor[None])[:rows]

        return self.gather(recursively_apply(kept, input_data))

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Do nothing: all processes have equally many batches."""
        del joinables, even_batches
        yield

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Save everything that is prepared, and the position in the data.

        Raises:
            StepInFlight: Called between the backward pass of an update and its optimizer step.
        """
        if self._stride is not None:
            self._stride.state_dict()  # raises before anything is written
        return super().save_state(output_dir, *args, **kwargs)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return the loader, whose next pass begins after some batches.

        After `load_state`, training continues where the state was saved, and nothing is skipped.
        """
        if isinstance(dataloader, TrainBatches):
            dataloader.skip(num_batches)
            return dataloader
        if isinstance(dataloader, EvalBatches):
            raise ConfigError(
                "skip_first_batches() got an evaluation loader, whose batches differ in size; "
                "skip in the data set instead: torch.utils.data.Subset"
            )
        return super().skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> Any:
        """Release everything that is prepared, and close the `Stride`."""
        self._close()
        return super().free_memory(*objects)

    def clear(self, *objects: Any) -> Any:
        """Release everything that is prepared, and close the `Stride`."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """Close the `Stride`, end trackers and leave the process group."""
        self._close()
        super().end_training()

    @property
    def _engine_averages(self) -> bool:
        """Whether DDP or FSDP averages the gradients, and not a mode of synchronisation."""
        sync = self._stride_options.get("sync") or os.environ.get("EVENSTRIDE_SYNC") or "bsp"
        return by_all_reduce(sync)

    _preparing = False
    _chosen: DataLoader[Any] | None = None  # the training loader in a running `prepare`

    def _begin(self, loader: DataLoader[Any]) -> None:
        """Create the Stride for the training loader; collective."""
        if self._stride is not None:
            raise ConfigError(
                "a training loader was prepared already, and an EvenAccelerator has one; for "
                "another training, call accelerator.free_memory() first. For evaluation, "
                "prepare_data_loader(loader, train=False)"
            )
        refuse_order(loader)
        assert loader.batch_size is not None, "such a loader has no BatchSampler"
        steps = self.gradient_accumulation_steps
        unit = loader.batch_size * steps
        whole = unit if self.split_batches else unit * self.num_processes
        seed = getattr(self.dataloader_config, "data_seed", None)
        options = {**({} if seed is None else {"seed": seed}), **self._stride_options}
        self._stride = Stride(self._global_batch or whole, **options)
        self._pace.follow(self._stride, unit)

    def _training(self, loader: DataLoader[Any], device: torch.device | None) -> TrainBatches:
        if loader is not self._chosen:
            self._begin(loader)
        steps = self.gradient_accumulation_steps
        options = {**options_of(loader), **self._loader_options}
        if steps > 1:
            options["micro_batches"] = steps
        inner = self.stride.loader(
            loader.dataset,
            shuffle=not isinstance(loader.sampler, SequentialSampler),
            drop_last=loader.drop_last,
            **options,
        )
        assert isinstance(inner, TrainLoader)
        move = Mover(device, non_blocking=self.non_blocking)
        self._train = TrainBatches(loader, self.stride, inner, move, steps)
        self._position.follow(self._train)
        return self._train

    def _evaluation(self, loader: DataLoader[Any], device: torch.device | None) -> EvalBatches:
        assert loader.batch_size is not None, "such a loader has no BatchSampler"
        batch = loader.batch_size * (1 if self.split_batches else self.num_processes)
        if self._stride_options.get("max_share") is not None:
            batch = min(batch, self.stride.global_batch)  # shares are limited for this batch
        options = {
            name: self._loader_options[name]
            for name in ("seeded", "check_data")
            if name in self._loader_options
        }
        # One batch per step, so that all processes have equally many.
        inner = self.stride.loader(
            loader.dataset,
            train=False,
            global_batch=batch,
            max_micro_batch=batch,
            **options_of(loader),
            **options,
        )
        assert isinstance(inner, EvalLoader)
        return EvalBatches(loader, inner, Mover(device, non_blocking=self.non_blocking), batch)

    def _note(self, model: nn.Module) -> None:
        """Note a prepared model if it is trained."""
        trained = any(p.requires_grad for p in model.parameters())
        # A model without an engine is not wrapped, because nothing of it is trained, say.
        engine = self.num_processes == 1 or not self._engine_averages or averages(model)
        if trained and engine and not any(model is known for known in self._trained):
            self._trained.append(model)

    def _watch(self) -> None:
        """Watch the models that are trained; collective."""
        if self._stride is not None:
            for model in self._trained[len(self._watched) :]:
                self._watched.append(self._stride.watch(model))

    def _gathered(self, tensor: Tensor) -> Any:
        """Concatenate the rows of all processes; collective."""
        if not tensor.ndim:
            return super().gather(tensor)
        here = torch.tensor([len(tensor)], device=tensor.device)
        rows: list[int] = super().gather(here).tolist()
        if len(set(rows)) == 1:
            return super().gather(tensor)
        most = max(rows)
        padded = tensor.new_zeros((most, *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        whole: Tensor = super().gather(padded)
        return torch.cat([whole[n * most : n * most + mine] for n, mine in enumerate(rows)])

    def _refuse(self, what: str, instead: str) -> None:
        if self.state.num_processes > 1:
            raise ConfigError(
                f"{what} treats all processes alike, but with EvenAccelerator they have batches of "
                f"different sizes; use {instead} instead"
            )

    def _refuse_retries(self) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None:
            if frame.f_globals.get("__name__") == "accelerate.utils.memory":
                self._refuse(
                    "find_executable_batch_size",
                    "gradient_accumulation_steps, or EvenAccelerator(max_share=...) on the process "
                    "that lacks memory,",
                )
                return
            frame = frame.f_back

    def _close(self) -> None:
        if self._stride is not None:
            self._stride.close()
        self._stride = self._train = None
        self._pace.follow(None)
        self._position.follow(None)
        self._watched.clear()
        self._trained.clear()


def _all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
