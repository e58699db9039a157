"""Ray Train: a `TorchTrainer` whose workers get shares by speed. See docs/how-to/ray.md.

Traps of Ray Train 2.60 that this module avoids:

* ``ray.train.torch.prepare_data_loader`` builds a new loader from ``batch_size``, and fetches one
  batch ahead, so the batch in hand would not be the one that `Stride` expects.
* ``ray.train.report`` and ``ray.train.get_preemption_info`` are barriers: each worker must call
  them equally often. Here, steps decide when to call them.
* The training function runs in a thread of an actor that Ray kills afterwards, so functions
  registered with `atexit` do not run.
"""

from __future__ import annotations

import json
import os
import posixpath
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from evenstride.errors import CheckpointDamaged, ConfigError, UsageError
from evenstride.integrations.user_loader import draws_each_once, kept_options
from evenstride.integrations.versions import warn_if_untested
from evenstride.runtime.checkpoint.restore.saved_state import (
    SavedObjects,
    derive_random,
    optimizer_state,
    training_of,
)
from evenstride.runtime.checkpoint.run_binding import RunBinding
from evenstride.runtime.environment import read_environment
from evenstride.runtime.run_start import refuse_everywhere
from evenstride.runtime.stride import Stride

__all__ = ["RayLoader", "RayStride", "prepare"]

_TESTED = "2.60"
# Files of a checkpoint. The model's is a plain state dict of the unwrapped model.
_MODEL, _TRAINING, _POSITION = "model.pt", "training.pt", "evenstride.json"
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
# Steps between two questions to Ray whether a node will be preempted; each costs a few ms.
_ASK_EVERY = 10


def prepare(
    loader: DataLoader[Any],
    model: nn.Module,
    *,
    global_batch: int | None = None,
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: dict[str, Any] | None = None,
    loader_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[RayStride, Any, nn.Module]:
    """Return `RayStride`, `RayLoader` and model for a training function; collective.

    It replaces ``ray.train.torch.prepare_data_loader`` and ``ray.train.torch.prepare_model``. The
    model is moved to the worker's device and wrapped in `DistributedDataParallel`, and batches are
    moved to that device. The loader gives each worker its share of every global batch, in an order
    of evenstride, in which each sample occurs once per epoch.

    Args:
        loader: The script's `DataLoader`, with its ``batch_size`` per worker. Shuffling,
            ``drop_last`` and options such as ``num_workers`` are kept. An `IterableDataset` is read
            as a `Stream`, so it must not be split by worker.
        model: A module, or one that is already wrapped in DDP or sharded by ``fully_shard``.
        global_batch: Samples per step over all workers. ``None`` uses that of the checkpoint from
            which Ray resumes, else ``EVENSTRIDE_GLOBAL_BATCH``, else ``batch_size`` times the
            number of workers. Set it for elastic runs, so that it does not depend on the first
            number of workers.
        parallel_strategy: ``ddp``, or ``None`` to leave the model unwrapped, as with
            ``Stride(engine="none")``.
        parallel_strategy_kwargs: Arguments of `DistributedDataParallel`.
        loader_options: More arguments of `Stride.loader`, such as ``{"max_micro_batch": 32}``.
        **options: More arguments of `Stride`, such as ``policy`` or ``max_share``.

    Raises:
        ConfigError: Called outside of a training function, or the loader, the strategy, the
            device or an option is not supported.

    Example::

        def train_fn(config):
            loader = DataLoader(dataset, batch_size=64, shuffle=True)
            stride, loader, model = prepare(loader, Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            stride.restore(model=model, optimizer=optimizer)
            for epoch in range(stride.epoch, config["epochs"]):
                for x, y in loader:
                    optimizer.zero_grad()
                    stride.scale(F.cross_entropy(model(x), y)).backward()
                    optimizer.step()
                stride.report({"epoch": epoch}, model=model, optimizer=optimizer)
    """
    workers = _workers()
    try:
        _refuse_loader(loader)
        _refuse_strategy(parallel_strategy)
    except ConfigError as error:
        refuse_everywhere(error, None)
    batch = loader.batch_size
    assert batch is not None, "loaders without batches are refused"
    if global_batch is None:
        planned = read_environment(os.environ).global_batch
        global_batch = _saved_batch() or planned or batch * workers
    stride = RayStride(global_batch, **options)
    try:
        ours = stride.loader(
            loader.dataset,
            shuffle=_shuffles(loader),
            drop_last=loader.drop_last,
            **{**kept_options(loader), **(loader_options or {})},
        )
        if isinstance(model, DistributedDataParallel | FSDPModule):
            parallel_strategy = None
        model = ray.train.torch.prepare_model(
            model,
            parallel_strategy=parallel_strategy,
            parallel_strategy_kwargs=parallel_strategy_kwargs,
        )
        return stride, RayLoader(stride, ours, ray.train.torch.get_device()), stride.watch(model)
    except BaseException:
        stride.close()
        raise


class RayStride(Stride):
    """A `Stride` that saves through Ray's storage, and closes when the training function ends.

    `prepare` creates it. A script that calls ``ray.train.torch.prepare_model`` itself may create
    it, too, on every worker: ``RayStride(global_batch=512)``.

    Args:
        global_batch: Samples per step over all workers; see `Stride`.
        **options: Further arguments of `Stride`.

    Raises:
        ConfigError: Called outside of a training function, or see `Stride`.
    """

    def __init__(self, global_batch: int, **options: Any) -> None:
        _workers()
        _refuse_device(ray.train.torch.get_device())
        super().__init__(global_batch, **options)
        self._binding = RunBinding(self)
        self._announced = False
        if self._binding.rank == 0:
            warn_if_untested("ray", _TESTED, _TESTED)
        _ends.closer = _Closer(self)

    def report(
        self,
        metrics: dict[str, Any],
        *,
        model: nn.Module,
        optimizer: Any = None,
        scheduler: Any = None,
        extra: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Report metrics with a checkpoint, through ``ray.train.report``; collective.

        The checkpoint has the position in the data, so that a run continues within an epoch, with
        any number of workers. Ray keeps, uploads and deletes checkpoints by its ``RunConfig``.
        Without storage (``num_workers=0``), and in trials of ``evenstride lab``, only the metrics
        are reported.

        Args:
            metrics: Those of rank 0 count; use `mean` for a mean over all workers.
            model: The trained model. ``model.pt`` in the checkpoint is its plain state dict.
            optimizer: One or several optimizers of its parameters.
            scheduler: One or several objects with ``state_dict`` and ``load_state_dict``.
            extra: More such objects by name. Those of rank 0 are saved.
            **options: Further arguments of ``ray.train.report``.

        Raises:
            ConfigError: An argument cannot be saved.
            StepInFlight: Called between a step's backward pass and its optimizer step.
        """
        training = training_of(model, optimizer, scheduler, extra)
        checkpoint = None
        with self._binding.waiting():  # neither copies nor uploads are slow training
            if self._saves:
                state = self._binding.state(training.optimizers)
                files = _whole_state(training)
                if self._binding.rank == 0:
                    checkpoint = self._written(state, files)
            ray.train.report(
                metrics,
                checkpoint,
                **{"delete_local_checkpoint_after_upload": True, **options},
            )

    def restore(
        self,
        *,
        model: nn.Module,
        optimizer: Any = None,
        scheduler: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> bool:
        """Restore the checkpoint from which Ray resumes, if there is one; collective.

        Call it before the training loop, with the arguments of `report`. Loading runs no code of
        the checkpoint.

        Returns:
            Whether a checkpoint was restored.

        Raises:
            CheckpointDamaged: A file is missing or has other content.
            ConfigError: The checkpoint belongs to another global batch, seed or data set, or was
                not written by `report`.
        """
        saved = ray.train.get_checkpoint()
        if saved is None:
            return False
        training = training_of(model, optimizer, scheduler, extra)
        with self._binding.waiting(), saved.as_directory() as folder:
            position = _position(saved)
            files = _loaded(Path(folder))
            self.load_state_dict(position["stride"])
            set_model_state_dict(model, files[_MODEL], options=_WHOLE)
            _put(training, files[_TRAINING])
        derive_random(position["stride"]["seed"], self.step, self._binding.rank)
        self._binding.recall(position["workers"])
        return True

    def save_due(self, every: int) -> bool:
        """Return whether to report a checkpoint after this step; the same on every worker.

        It is true after each ``every`` steps, and once as soon as Ray announces that a node will
        be preempted. Call it after every optimizer step, on every worker.

        Args:
            every: Steps between two checkpoints, at least 1.

        Raises:
            ConfigError: ``every`` is less than 1.

        Cost:
            A question to Ray in every tenth step, about 3 ms.
        """
        if every < 1:
            raise ConfigError(f"every is {every}; it must be a number of steps of at least 1")
        announced = False
        if not self._announced and self.step % _ASK_EVERY == 0:
            with self._binding.waiting():
                announced = self._announced = ray.train.get_preemption_info() is not None
        return announced or self.step % every == 0

    @property
    def _saves(self) -> bool:
        if self._binding.environment.checkpoints is not None:  # of a trial
            return False
        try:
            ray.train.get_context().get_storage()
        except NotImplementedError:  # Ray's local mode
            return False
        return True

    def _written(self, state: dict[str, Any], files: dict[str, Any]) -> ray.train.Checkpoint:
        folder = Path(tempfile.mkdtemp(prefix="evenstride-"))  # Ray deletes it after the upload
        for name, content in files.items():
            torch.save(content, folder / name)
        position = {"stride": state, "workers": self._binding.remember()}
        (folder / _POSITION).write_text(json.dumps(position))
        return ray.train.Checkpoint.from_directory(folder)


class RayLoader:
    """The batches of a worker, on its device; `prepare` returns it.

    It has the attributes of `Stride.loader`'s result, such as ``dataset``, and its ``len``, the
    number of steps of an epoch.
    """

    def __init__(self, stride: Stride, loader: DataLoader[Any], device: torch.device) -> None:
        self._loader, self._device = loader, device
        self.sampler = _Epochs(stride)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield _moved(batch, self._device, ahead=self._loader.pin_memory)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of copies, before they have a loader
            raise AttributeError(name)
        return getattr(self._loader, name)


class _Epochs:
    """Accepts the calls for a `DistributedSampler`, whose work the loader does."""

    def __init__(self, stride: Stride) -> None:
        self._stride = stride

    def set_epoch(self, epoch: int) -> None:
        """Check that the script counts epochs as the run does, also after a restart."""
        if epoch != self._stride.epoch:
            raise UsageError(
                f"set_epoch({epoch}) was called, but training is in epoch {self._stride.epoch}; "
                "loop over range(stride.epoch, epochs), so that a resumed run does not train "
                "more epochs than asked"
            )


class _Closer:
    """Closes a `Stride` with the thread that created it."""

    def __init__(self, stride: Stride) -> None:
        self._stride = stride

    def __del__(self) -> None:
        # The main thread belongs to a script in local mode, for which atexit does this.
        if threading.current_thread() is not threading.main_thread():
            self._stride.close()


# Python clears this when a thread ends. Ray destroys the process group and kills the process after
# that, in another thread.
_ends = threading.local()


def _workers() -> int:
    """Return the number of workers; raise `ConfigError` outside of a training function."""
    if not hasattr(ray.train, "get_preemption_info"):
        raise ConfigError(
            "RAY_TRAIN_V2_ENABLED switches Ray Train's second version off, and the first is not "
            "supported; remove the variable, or set it to 1, on the driver and on all nodes"
        )
    try:
        return int(ray.train.get_context().get_world_size())
    except RuntimeError as error:
        raise ConfigError(
            "this must be called in the training function of a TorchTrainer, on every worker; "
            f"Ray says: {error}"
        ) from None


def _refuse_device(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f'Ray gave this worker a device of type "{device.type}", but evenstride trains on CPU '
            "and CUDA devices; leave use_tpu, and other accelerators in resources_per_worker, out "
            "of the ScalingConfig"
        )


def _refuse_loader(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"the loader is of type {type(loader).__name__}; it must be torch's DataLoader. A "
            "shard of Ray Data gives all workers equally many rows in an order of its own; read "
            "the rows in a data set with __getitem__ and __len__, or use "
            "evenstride.Shards"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise ConfigError(
            "the DataLoader has a batch_sampler of its own (or no batch_size), but evenstride "
            "draws the batches; give it batch_size= and shuffle= instead"
        )
    if isinstance(loader.dataset, IterableDataset):  # has no sampler; read as a `Stream`
        return
    sampler, how = loader.sampler, ""
    if type(sampler) is RandomSampler:
        if draws_each_once(sampler, loader.dataset):
            return
        how = " with replacement" if sampler.replacement else " that does not draw each sample once"
    elif type(sampler) in (SequentialSampler, DistributedSampler):
        return
    raise ConfigError(
        f"the DataLoader draws samples by a {type(sampler).__name__}{how}, but evenstride trains "
        "each sample once per epoch in an order of its own; use shuffle=True or shuffle=False"
    )


def _refuse_strategy(strategy: object) -> None:
    if strategy not in ("ddp", None):
        raise ConfigError(
            f"parallel_strategy is {strategy!r}; it must be 'ddp', or None for a model that is "
            "sharded already; instead of 'fsdp' (FSDP1, whose gradients cannot be weighted "
            "exactly), call torch.distributed.fsdp.fully_shard on the model first"
        )


def _shuffles(loader: DataLoader[Any]) -> bool:
    sampler: Any = loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        return False
    return bool(getattr(sampler, "shuffle", not isinstance(sampler, SequentialSampler)))


def _moved(batch: Any, device: torch.device, *, ahead: bool) -> Any:
    """Return a batch on a device: tensors in tuples, lists and mappings, and what has ``to``."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=ahead)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device, ahead=ahead) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [_moved(value, device, ahead=ahead) for value in batch]
        if isinstance(batch, tuple):
            return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
        return values
    return batch.to(device) if hasattr(batch, "to") else batch


def _saved_batch() -> int | None:
    """Return the global batch of the checkpoint from which Ray resumes."""
    saved = ray.train.get_checkpoint()
    return None if saved is None else int(_position(saved)["stride"]["global_batch"])


def _position(saved: ray.train.Checkpoint) -> dict[str, Any]:
    """Return what `report` saved, except for the tensors, without a download of these."""
    try:
        with saved.filesystem.open_input_stream(posixpath.join(saved.path, _POSITION)) as file:
            position = json.loads(file.read())
        return {"stride": position["stride"], "workers": position["workers"]}
    except FileNotFoundError:
        raise ConfigError(
            f"the checkpoint {saved.path} has no {_POSITION}, so it was not saved by "
            "stride.report(); give this run another name, or load the checkpoint in the script "
            "and set global_batch"
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointDamaged(
            f"{_POSITION} in {saved.path} is damaged ({error}); delete this checkpoint, so that "
            "Ray resumes from an earlier one"
        ) from error


def _whole_state(training: SavedObjects) -> dict[str, Any]:
    """Return the content of both files on rank 0; collective if the model is sharded."""
    others = {key: each.state_dict() for key, each in training.others()}
    optimizer = optimizer_state(training, options=_WHOLE)
    return {
        _MODEL: get_model_state_dict(training.model, options=_WHOLE),
        _TRAINING: {"optimizer": optimizer, "others": others},
    }


def _loaded(folder: Path) -> dict[str, Any]:
    try:
        return {
            name: torch.load(folder / name, map_location="cpu", weights_only=True)
            for name in (_MODEL, _TRAINING)
        }
    except Exception as error:
        raise CheckpointDamaged(
            f"the checkpoint in {folder} cannot be read ({type(error).__name__}: {error}); delete "
            "it, so that Ray resumes from an earlier one"
        ) from error


def _put(training: SavedObjects, saved: dict[str, Any]) -> None:
    if training.optimizers:
        set_optimizer_state_dict(
            training.model, training.optimizers, saved["optimizer"], options=_WHOLE
        )
    for key, each in training.others():
        if key not in saved["others"]:
            raise ConfigError(
                f"the checkpoint has no {key}; pass restore() the arguments that report() got"
            )
        each.load_state_dict(saved["others"][key])
