"""What is trained, where training stands and what evaluation found there, told to the trace."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor, nn

from evenstride.core.sampling.partition import EpochCursor
from evenstride.errors import ConfigError
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.loading.position import CommittedPosition, EpochOrder


def workload_facts(models: Sequence[nn.Module], samples: int) -> Plain:
    """Return the facts of a workload as JSON types; the device is empty if not known."""
    trained = [
        (name, parameter)
        for model in models
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    # Sorted and without wrappers' prefixes: the digest is that of the model, however it is
    # wrapped.
    shapes = sorted(f"{_plain(name)} {tuple(p.shape)} {p.dtype}" for name, p in trained)
    device = trained[0][1].device if trained else torch.device("cpu")
    return {
        "parameters": sum(p.numel() for _, p in trained),
        "gradient_bytes": sum(p.numel() * p.element_size() for _, p in trained),
        "digest": hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16],
        "samples": samples,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
    }


def tell_workload(
    leader: Leader | None, models: Sequence[nn.Module], order: EpochOrder | None
) -> None:
    """Write into the trace what is trained; nothing without a leader, a watched model or data."""
    if leader is not None and models and order is not None:
        leader.note("workload", **workload_facts(models, order.length))


def _plain(name: str) -> str:
    """Return a parameter's name without what wrappers put before it."""
    return name.removeprefix("module.").replace("_orig_mod.", "")


_LONGEST = 100


def check_metric(name: str, value: float | Tensor) -> None:
    """Raise `ConfigError` unless there is a name of 1 to 100 characters, and one value."""
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
    leader: Leader | None, name: str, value: float | Tensor, progress: CommittedPosition
) -> None:
    """Write a mean over all ranks into the trace; what is not finite as ``null``."""
    if leader is not None:
        number = float(value)
        leader.note(
            "metric",
            step=progress.loaded + progress.step,  # own ones, as in all records, in every mode
            epochs=epochs_trained(progress),
            name=name,
            value=number if isfinite(number) else None,
        )


def tell_pass(leader: Leader | None, progress: CommittedPosition) -> None:
    """Write into the trace where a pass begins, before its first step is committed."""
    if leader is not None:
        epochs = epochs_trained(progress)
        leader.count_from(progress.loaded)
        batch = progress.global_batch
        leader.note(
            "pass", step=progress.step, epochs=epochs, samples=progress.end, global_batch=batch
        )


def epochs_trained(progress: CommittedPosition) -> float:
    """Return how many epochs have been trained over all restarts, parts of epochs as such."""
    end, saved = progress.end, progress.restored
    if saved is not None and saved.length is not None:  # there is no loader yet
        end = EpochCursor(saved.length, saved.global_batch, saved.drop_last).end
    # An epoch that was left early, for the next one, counts as a whole.
    return progress.epoch + (progress.position / end if end else 0.0)
