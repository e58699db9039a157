"""Checks of single arguments, all with the same words."""

from __future__ import annotations

import operator
from typing import Any

from evenstride.errors import ConfigError


def check_whole(name: str, value: object, least: int | None = None) -> None:
    """Raise unless a value is a whole number, and not below ``least``.

    Raises:
        ConfigError: names the argument, its value and what is possible.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or (least is not None and isinstance(value, int) and value < least):
        range_of = "" if least is None else f" of at least {least}"
        raise ConfigError(f"{name} is {value!r}; it must be a whole number{range_of}")


def refuse_for_evaluation(**asked: object) -> None:
    """Raise if what is for training was asked of an evaluation loader.

    Raises:
        ConfigError: names the arguments.
    """
    named = [name for name, value in asked.items() if value is not None and value is not False]
    if named:
        raise ConfigError(
            f"{', '.join(named)} cannot be with train=False: evaluation sees each sample once, and "
            "counts are given to stride.mean(); leave it out"
        )


def refuse_for_training(global_batch: int | None) -> None:
    """Raise if a training loader was asked for a global batch of its own.

    Raises:
        ConfigError: it was.
    """
    if global_batch is not None:
        raise ConfigError(
            "loader(global_batch=...) is for evaluation (train=False); training uses the "
            "global batch of the Stride"
        )


def whole(value: Any) -> Any:
    """Return the value as an int where it is one in any guise; else as it is, to be refused."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def by_epoch(partition: str, cost_fn: object) -> bool:
    """Return whether the data set is cut once per epoch.

    Raises:
        ConfigError: there is no such partition, or it cannot be together with costs.
    """
    if partition not in ("step", "epoch"):
        raise ConfigError(
            f"partition is {partition!r}; it must be 'step' (each step's samples are dealt out), "
            "or 'epoch' (each rank keeps to a part of the data set for an epoch)"
        )
    if partition == "epoch" and cost_fn is not None:
        raise ConfigError(
            "partition='epoch' cuts the data set by numbers of samples, so cost_fn cannot be "
            "together with it; leave one of them out"
        )
    return partition == "epoch"
