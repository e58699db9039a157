"""Where training stands, and what evaluation found there, told to the trace."""

from __future__ import annotations

from math import isfinite

from torch import Tensor

from evenstride.core.partition import EpochCursor
from evenstride.errors import ConfigError
from evenstride.runtime.leader import Leader
from evenstride.runtime.progress import Progress

_LONGEST = 100


def check_metric(name: str, value: float | Tensor) -> None:
    """Refuse to record what is no number, or has no name.

    Raises:
        ConfigError: the name is no text of 1 to 100 characters, or the value has several elements.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST:
        raise ConfigError(
            f"mean(name={name!r}): the name under which a value is recorded must be a text of 1 to "
            f'{_LONGEST} characters, such as "loss"'
        )
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ConfigError(
            f'mean(name="{name}") records one number, and the total is a tensor of shape '
            f"{tuple(value.shape)}; give one of 1 element, or leave the name out"
        )


def tell_metric(
    leader: Leader | None, name: str, value: float | Tensor, progress: Progress
) -> None:
    """Write a mean over all ranks into the trace; nothing without a leader.

    Args:
        leader: of this rank, if it is the leader's.
        name: of what it is a mean.
        value: of one element; what is not finite is written as ``null``.
        progress: of this rank.
    """
    if leader is not None:
        number = float(value)
        leader.note(
            "metric",
            step=progress.loaded + progress.step,  # own ones, as in all records, in every mode
            epochs=epochs_trained(progress),
            name=name,
            value=number if isfinite(number) else None,
        )


def tell_pass(leader: Leader | None, progress: Progress) -> None:
    """Write into the trace where a pass over the data begins; nothing without a leader.

    Args:
        leader: of this rank, if it is the leader's.
        progress: of this rank, before the pass's first step is committed.
    """
    if leader is not None:
        epochs = epochs_trained(progress)
        leader.board.earlier = progress.loaded
        batch = progress.global_batch
        leader.note(
            "pass", step=progress.step, epochs=epochs, samples=progress.end, global_batch=batch
        )


def epochs_trained(progress: Progress) -> float:
    """Return how many epochs have been trained in all, over all restarts.

    Parts of an epoch count as such. One that was left early, for the next one, counts as a whole.
    """
    end, saved = progress.end, progress.restored
    if saved is not None and saved.length is not None:  # there is no loader yet
        end = EpochCursor(saved.length, saved.global_batch, saved.drop_last).end
    return progress.epoch + (progress.position / end if end else 0.0)
