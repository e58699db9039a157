"""What a training loader is laid out like: compared between the ranks, and checked."""

from __future__ import annotations

from evenstride.core.partition import EpochCursor
from evenstride.errors import ConfigError
from evenstride.runtime.agreement import Plain, require_equal
from evenstride.runtime.checks import check_whole
from evenstride.runtime.loader import LoaderOptions
from evenstride.runtime.setup import Settings


def layout(length: int, asked: LoaderOptions) -> Plain:
    """Return what all ranks must have alike, and their micro-batches, as JSON types."""
    return {
        "length": length,
        "shuffle": asked.shuffle,
        "drop_last": asked.drop_last,
        "by_epoch": asked.by_epoch,
        "weighted": asked.weight_fn is not None,
        "micro": asked.max_micro_batch,
        "cold_prefetch": asked.cold_prefetch,
    }


def judge_loader(shown: list[Plain]) -> Plain:
    """Compare the layouts; micro-batches on one rank mean `accumulate` on all."""
    micro = tuple(mine.pop("micro") for mine in shown)
    return {**equal(shown, "the training loader"), "micro": micro}


def equal(shown: list[Plain], topic: str) -> Plain:
    """Return what all ranks have alike.

    Raises:
        RanksDisagree: they do not.
    """
    require_equal(shown, topic)
    return shown[0]


def check_loader(length: int, asked: LoaderOptions, settings: Settings) -> None:
    """Raise unless a training loader can be laid out as it is asked for.

    Raises:
        ConfigError: it leaves nothing to train, or its micro-batches do not fit the quantum.
    """
    global_batch, quantum, micro = settings.global_batch, settings.quantum, asked.max_micro_batch
    if asked.drop_last and EpochCursor(length, global_batch, drop_last=True).end == 0:
        raise ConfigError(
            f"drop_last leaves nothing: the data set has {length} samples, fewer than the global "
            f"batch of {global_batch}; lower the global batch or leave drop_last out"
        )
    check_micro_batch(micro)
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
