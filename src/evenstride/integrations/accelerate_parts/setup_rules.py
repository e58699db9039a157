"""Which loader is for training, and which settings are refused."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from evenstride.errors import ConfigError
from evenstride.integrations.user_loader import draws_each_once, kept_options


def training_loader(
    loaders: list[DataLoader[Any]], *, optimizes: bool, known: bool
) -> DataLoader[Any] | None:
    """Return the loader that is for training, if any; raise `ConfigError` if that is not clear.

    Args:
        loaders: those of one call of `prepare`.
        optimizes: whether an optimizer is prepared together with them.
        known: whether there is a training loader already.
    """
    ordered = [one for one in loaders if not _keeps_order(one)]
    if len(ordered) + known > 1:
        raise ConfigError(
            f"{len(ordered) + known} loaders do not keep the order of their data set, so it is not "
            "clear which one is for training, and an EvenAccelerator has one training loader; "
            "leave shuffle out of those for evaluation, or say so: "
            "accelerator.prepare_data_loader(loader, train=False)"
        )
    if known:
        return None
    return next(iter(ordered or (loaders if optimizes else ())), None)


def refuse_order(loader: DataLoader[Any]) -> None:
    """Raise `ConfigError` unless evenstride can take over the order of a training loader."""
    data: Any = loader.dataset
    sampler: Any = loader.sampler
    if isinstance(data, IterableDataset):
        what = f"an IterableDataset ({type(data).__name__}), which has an order of its own"
        instead = "a map-style data set, or evenstride.Shards in a loop with evenstride.Stride"
    elif type(loader.batch_sampler) is not BatchSampler:
        kind = "no batch_size" if loader.batch_sampler is None else "a batch_sampler of its own"
        what = f"{kind}, but evenstride forms the batches"
        instead = "DataLoader(dataset, batch_size=..., shuffle=True)"
    elif type(sampler) is not SequentialSampler and not (
        type(sampler) in (RandomSampler, SeedableRandomSampler) and draws_each_once(sampler, data)
    ):
        what = (
            f"a {type(sampler).__name__}, but evenstride draws each sample of the data set once "
            "per epoch"
        )
        instead = "shuffle=True, and torch.utils.data.Subset for a part of the data"
    else:
        return
    raise ConfigError(f"the training loader has {what}; use {instead}")


def _keeps_order(loader: DataLoader[Any]) -> bool:
    plain = type(loader.batch_sampler) is BatchSampler
    return plain and type(loader.sampler) is SequentialSampler


def evaluates_evenly(loader: DataLoader[Any]) -> bool:
    return _keeps_order(loader) and not loader.drop_last


def unprepared(one: Any) -> bool:
    return isinstance(one, DataLoader) and not getattr(one, "_is_accelerate_prepared", False)


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options of a loader that `Stride.loader` passes on."""
    options = kept_options(loader)
    return options if getattr(loader, "in_order", True) else {**options, "in_order": False}


def refuse_plugins(given: dict[str, Any]) -> None:
    """Refuse what Accelerate would import or look for devices for, before it does."""
    plugins = (
        ("DeepSpeed", ("deepspeed_plugin", "deepspeed_plugins"), "ACCELERATE_USE_DEEPSPEED"),
        ("Megatron-LM", ("megatron_lm_plugin",), "ACCELERATE_USE_MEGATRON_LM"),
    )
    for name, arguments, variable in plugins:
        used = any(given.get(argument) is not None for argument in arguments)
        if used or os.environ.get(variable, "false").lower() == "true":
            raise ConfigError(
                f"EvenAccelerator got the {name} plugin, which divides and reduces gradients by "
                "its own rules; use FullyShardedDataParallelPlugin(fsdp_version=2), or plain "
                "multi-process training"
            )
    plan = given.get("parallelism_config") or given.get("torch_tp_plugin")
    if plan is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        plan = ParallelismConfig()  # reads the launcher's variables
    _refuse([_divides_samples(plan)])


def refuse_setup(accelerator: Accelerator) -> None:
    """Refuse settings that need equal batches on all processes; alike on each."""
    _refuse(_obstacles(accelerator))


def _refuse(obstacles: Iterable[tuple[str, bool, str]]) -> None:
    for what, found, instead in obstacles:
        if found:
            raise ConfigError(f"EvenAccelerator cannot work with {what}; {instead}")


def _divides_samples(plan: Any) -> tuple[str, bool, str]:
    return (
        "tensor, context or sequence parallelism, whose processes need the same samples",
        any(getattr(plan, f"{name}_size", 1) > 1 for name in ("tp", "cp", "sp")),
        "use data parallelism alone: DDP, or FSDP version 2",
    )


def _obstacles(accelerator: Accelerator) -> Iterable[tuple[str, bool, str]]:
    state = accelerator.state
    kind, sharded = state.distributed_type, state.distributed_type == DistributedType.FSDP
    accumulation = accelerator.gradient_state.plugin_kwargs
    yield "TPUs (XLA)", kind == DistributedType.XLA, "train on GPUs or CPUs"
    yield (
        "FSDP version 1, whose waits cannot be separated from work",
        sharded and not accelerator.is_fsdp2,
        "set FullyShardedDataParallelPlugin(fsdp_version=2)",
    )
    yield (
        "dispatch_batches=True, with which one process loads and splits all batches equally",
        bool(accelerator.dispatch_batches),
        "leave it out: every process loads its own samples",
    )
    yield _divides_samples(accelerator.parallelism_config)  # of an earlier accelerator
    yield (
        "GradientAccumulationPlugin(sync_each_batch=True)",
        bool(accumulation.get("sync_each_batch")),
        "leave it out: gradients are averaged once per update",
    )
    yield (
        "GradientAccumulationPlugin(sync_with_dataloader=False)",
        not accumulation.get("sync_with_dataloader", True),
        "leave it out: the last update of an epoch ends with the epoch",
    )
