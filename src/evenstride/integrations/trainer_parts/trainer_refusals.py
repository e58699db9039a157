"""Settings of a Trainer that cannot be combined with unequal shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from evenstride.errors import ConfigError

_DDP = "use DistributedDataParallel, which the Trainer uses when torchrun starts it, or FSDP2"


def refuse(trainer: Any, global_batch: object, sync: object) -> None:
    """Raise `ConfigError` for a setting that is not supported, alike on every rank."""
    for what, instead in _unsupported(trainer, global_batch, sync):
        raise ConfigError(f"EvenTrainer does not support {what}; {instead}")


def _unsupported(trainer: Any, global_batch: object, sync: object) -> Iterator[tuple[str, str]]:
    """Yield what is not supported, and what to do instead."""
    yield from _engines(trainer)
    yield from _arguments(trainer.args)
    if global_batch == "auto":
        yield (
            'global_batch="auto", because a Trainer counts its updates before training',
            "give a number",
        )
    sync = sync or os.environ.get("EVENSTRIDE_SYNC") or "bsp"
    if str(sync) != "bsp":
        yield (
            f'sync="{sync}", because a Trainer clips and saves what one rank has',
            "leave it out, or write a loop of your own",
        )


def _engines(trainer: Any) -> Iterator[tuple[str, str]]:
    args, parallel = trainer.args, getattr(trainer.accelerator, "parallelism_config", None)
    if trainer.is_deepspeed_enabled:
        yield "DeepSpeed, which weights all ranks equally", _DDP
    if args.n_gpu > 1:
        yield (
            f"DataParallel (one process for {args.n_gpu} GPUs), which splits batches equally",
            f"start one process per GPU: torchrun --nproc-per-node {args.n_gpu} SCRIPT",
        )
    kind = str(getattr(trainer.accelerator.distributed_type, "value", ""))
    if kind in ("XLA", "TPU") or trainer.is_fsdp_xla_enabled:
        yield "TPUs", "train on GPUs or CPUs"
    if kind == "MEGATRON_LM" or args.parallel_mode.value == "sagemaker_model_parallel":
        yield "Megatron-LM and SageMaker's model parallelism", _DDP
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and getattr(plugin, "fsdp_version", 1) < 2:
        yield (
            "FSDP (version 1), which weights all ranks equally",
            'use FSDP2: fsdp_config={"version": 2}',
        )
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        yield "models that are sharded when they are loaded (distributed_config)", _DDP
    sizes = {name: getattr(parallel, f"{name}_size", 1) for name in ("tp", "cp", "sp")}
    if any(size > 1 for size in sizes.values()):
        named = ", ".join(f"{name}_size={size}" for name, size in sizes.items() if size > 1)
        yield f"ParallelismConfig({named})", "leave it out, so that every rank has its own batch"


def _arguments(args: Any) -> Iterator[tuple[str, str]]:
    loading = args.accelerator_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(loading, name, None):
            yield (
                f"accelerator_config={{{name!r}: True}}, which splits batches equally",
                "leave it out: every rank gets its share of each global batch",
            )
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size=True, with which each rank restarts on its own",
            "lower per_device_train_batch_size, which limits the micro-batches",
        )
    if args.train_sampling_strategy == "group_by_length":
        yield (
            'train_sampling_strategy="group_by_length", which has its own order of samples',
            'use "batch_rebalance", with which shares count tokens instead of samples',
        )
    if args.ignore_data_skip:
        yield (
            "ignore_data_skip=True, with which an epoch starts again",
            "leave it out: the position is restored without reading data",
        )
