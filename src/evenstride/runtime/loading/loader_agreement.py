"""What a training loader is laid out like: compared between the ranks, and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenstride.core.sampling.partition import EpochCursor
from evenstride.core.sampling.shard_assignment import ShardAssignment
from evenstride.errors import ConfigError
from evenstride.runtime.argument_checks import check_whole
from evenstride.runtime.coordination.agreement import Plain, require_equal
from evenstride.runtime.loading.data_check import SPLIT, judge_data, look
from evenstride.runtime.loading.loader_options import LoaderOptions, dataset_length
from evenstride.runtime.loading.sampler import EpochOrder
from evenstride.runtime.loading.shards import digest, lengths_of
from evenstride.runtime.settings import Settings
from evenstride.runtime.synchronisation.mode_checks import check_unaligned_loader


def layout(dataset: Any, asked: LoaderOptions, processes: int, seed: int | None) -> Plain:
    """Return what all ranks must have alike, and what each has of its own, as JSON types.

    Args:
        dataset: the data.
        asked: how it is to be laid out.
        processes: of this rank's loader.
        seed: of the samples; ``None`` to look at none of them.
    """
    return {
        "length": dataset_length(dataset),
        "shards": digest(lengths_of(dataset)),
        "shuffle": asked.shuffle,
        "drop_last": asked.drop_last,
        "by_epoch": asked.by_epoch,
        "weighted": asked.weight_fn is not None,
        "micro": asked.max_micro_batch,
        "lanes": max(processes, 1),
        "cold_prefetch": asked.cold_prefetch,
        "data": {} if seed is None or not asked.check_data else look(dataset, seed, processes),
    }


def judge_loader(shown: list[Plain], topic: str = "the training loader") -> Plain:
    """Compare the layouts and the data; micro-batches on one rank mean `accumulate` on all."""
    micro, lanes, data = (
        tuple(mine.pop(name) for mine in shown) for name in ("micro", "lanes", "data")
    )
    agreed = {
        **equal(shown, topic, {"length": f"probably {SPLIT}"}),
        "micro": micro,
        "lanes": lanes,
    }
    judge_data(data, topic)
    return agreed


def order_of(dataset: Any, agreed: Plain, asked: LoaderOptions, seed: int) -> EpochOrder:
    """Return how the epochs of a training loader are laid out, given what the ranks agreed on."""
    shards = lengths_of(dataset)
    return EpochOrder(
        length=agreed["length"],
        seed=seed,
        shuffle=asked.shuffle,
        drop_last=asked.drop_last,
        by_epoch=asked.by_epoch,
        shards=shards,
        lanes=tuple(agreed["lanes"]) if shards else (),
    )


def dealing(dataset: Any, agreed: Plain) -> ShardAssignment | None:
    """Return where an evaluation of shards begins; nothing for other data."""
    return order_of(dataset, agreed, LoaderOptions(shuffle=False), seed=0).dealing(epoch=0)


def equal(shown: list[Plain], topic: str, remedies: Mapping[str, str] | None = None) -> Plain:
    """Return what all ranks have alike; see `require_equal`.

    Raises:
        RanksDisagree: they do not.
    """
    require_equal(shown, topic, remedies)
    return shown[0]


def check_loader(
    dataset: Any, asked: LoaderOptions, settings: Settings, global_batch: int, *, by_cost: bool
) -> None:
    """Raise unless a training loader can be laid out as it is asked for.

    Raises:
        ConfigError: it leaves nothing to train, its micro-batches do not fit the quantum, or its
            ways to deal samples out do not go together.
    """
    length = dataset_length(dataset)
    if asked.drop_last and EpochCursor(length, global_batch, drop_last=True).end == 0:
        raise ConfigError(
            f"drop_last leaves nothing: the data set has {length} samples, fewer than the global "
            f"batch of {global_batch}; lower the global batch or leave drop_last out"
        )
    check_micro_batch(asked.max_micro_batch)
    _check_quantum(asked.max_micro_batch, settings.quantum, by_cost=by_cost)
    check_unaligned_loader(settings.mode, dataset, asked, by_cost=by_cost)
    other = "partition='epoch'" if asked.by_epoch else "cost_fn" if by_cost else ""
    if other and lengths_of(dataset):
        raise ConfigError(
            f"{other} chooses samples from all over the data set, and Shards are read in a row by "
            f"whoever has them; leave {other.partition('=')[0]} out, or use a map-style data set"
        )


def _check_quantum(micro: int | None, quantum: int, *, by_cost: bool) -> None:
    if by_cost and quantum > 1:
        raise ConfigError(
            "cost_fn deals samples out by cost, so a rank's number of samples is no "
            f"multiple of quantum={quantum}; leave one of them out"
        )
    if quantum > 1 and micro is not None and quantum % micro:
        raise ConfigError(
            f"shares of this rank are multiples of quantum={quantum}, and max_micro_batch={micro} "
            f"does not cut them into whole micro-batches; use max_micro_batch={quantum}, or a part "
            "of it without a rest"
        )


def check_micro_batch(size: int | None) -> None:
    """Raise unless it is a size.

    Raises:
        ConfigError: it is none.
    """
    if size is not None:
        check_whole("max_micro_batch", size, least=1)
