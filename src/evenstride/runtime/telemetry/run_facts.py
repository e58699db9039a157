"""Records of the workload, the position and the evaluation results, written to the trace."""

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
from evenstride.runtime.engines.device_support import device_name
from evenstride.runtime.loading.position import CommittedPosition, EpochOrder


def workload_facts(models: Sequence[nn.Module], samples: int) -> Plain:
    """Return the facts of a workload as JSON types; the device is empty on a CPU."""
    trained = [
        (name, parameter)
        for model in models
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    # Sorted and without prefixes of wrappers, so that the digest does not depend on wrappers.
    shapes = sorted(f"{_plain(name)} {tuple(p.shape)} {p.dtype}" for name, p in trained)
    device = trained[0][1].device if trained else torch.device("cpu")
    return {
        "parameters": sum(p.numel() for _, p in trained),
        "gradient_bytes": sum(p.numel() * p.element_size() for _, p in trained),
        "digest": hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16],
        "samples": samples,
        "device": "" if device.type == "cpu" else device_name(device),
    }


def tell_workload(
    leader: Leader | None, models: Sequence[nn.Module], order: EpochOrder | None
) -> None:
    """Write the workload to the trace, if there are a leader, a watched model and data."""
    if leader is not None and models and order is not None:
        leader.note("workload", **workload_facts(models, order.length))


def _plain(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers."""
    return name.removeprefix("module.").replace("_orig_mod.", "")


_LONGEST = 100


def check_metric(name: str, value: float | Tensor) -> None:
    """Raise `ConfigError` unless the name has 1 to 100 characters and there is one value."""
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST:
        raise ConfigError(
            f"mean(name={name!r}): invalid name; expected a text of 1 to {_LONGEST} characters, "
            'such as "loss"'
        )
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ConfigError(
            f'mean(name="{name}") records one number, but the total is a tensor of shape '
            f"{tuple(value.shape)}; pass a tensor of 1 element, or omit the name"
        )


def tell_metric(
    leader: Leader | None, name: str, value: float | Tensor, progress: CommittedPosition
) -> None:
    """Write a mean over all ranks to the trace; non-finite values become ``null``."""
    if leader is not None:
        number = float(value)
        leader.note(
            "metric",
            step=progress.loaded + progress.step,  # this worker's steps, in every mode
            epochs=epochs_trained(progress),
            name=name,
            value=number if isfinite(number) else None,
        )


def tell_pass(leader: Leader | None, progress: CommittedPosition) -> None:
    """Write the start of a pass to the trace, before its first step is committed."""
    if leader is not None:
        epochs = epochs_trained(progress)
        leader.count_from(progress.loaded)
        batch = progress.global_batch
        leader.note(
            "pass",
            step=progress.step,
            epochs=epochs,
            samples=progress.usual_end,
            global_batch=batch,
        )


def epochs_trained(progress: CommittedPosition) -> float:
    """Return the epochs trained over all restarts, with the fraction of the current one."""
    end, saved = progress.usual_end, progress.restored
    if saved is not None and saved.length is not None:  # there is no loader yet
        end = EpochCursor(saved.length, saved.global_batch, saved.drop_last).end
    # An epoch that was left early counts as complete.
    return progress.epoch + (progress.position / end if end else 0.0)
