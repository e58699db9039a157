"""The state of the random generators of one rank: torch, its CUDA device, numpy and Python."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from evenstride.runtime.checkpoint.checkpoint_errors import CheckpointDamaged


def capture(device: torch.device) -> dict[str, Any]:
    """Return the state of all generators as plain values.

    Args:
        device: that the model is on; its own generator is part of it if that is a CUDA device.
    """
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": _to_bytes(torch.get_rng_state()),
        "cuda": _to_bytes(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
        "numpy": (kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)),
        "python": random.getstate(),
    }


def restore(state: Any, device: torch.device) -> None:
    """Put all generators into a state that `capture` returned.

    Raises:
        CheckpointDamaged: it is not such a state.
    """
    try:
        torch.set_rng_state(_to_tensor(state["torch"]))
        if device.type == "cuda" and state["cuda"] is not None:
            torch.cuda.set_rng_state(_to_tensor(state["cuda"]), device)
        np.random.set_state(_of_numpy(*state["numpy"]))
        random.setstate(state["python"])
    except (KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointDamaged("the state of a random generator cannot be read") from error


def check(state: Any, device: torch.device) -> None:
    """Raise unless `restore` would accept a state; the generators are left as they are.

    Raises:
        CheckpointDamaged: it would not.
    """
    own = capture(device)
    try:
        restore(state, device)
    finally:
        restore(own, device)


def _of_numpy(kind: Any, keys: Any, position: Any, has_gauss: Any, cached: Any) -> Any:
    """Return a state for numpy, which checks neither the numbers nor the position in them."""
    whole = [*keys, position, has_gauss]
    if kind != "MT19937" or not all(type(number) is int for number in whole):
        raise ValueError("not a state of a Mersenne twister")
    if len(keys) != 624 or not 0 <= position <= 624 or not isinstance(cached, float):
        raise ValueError("not a state of a Mersenne twister")
    return kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached


def derive(seed: int, step: int, rank: int) -> None:
    """Seed all generators for a rank that the checkpoint has no state of.

    The seed is a function of the run's seed, the step and the rank, so that a restart repeats
    itself and no two ranks draw the same numbers.
    """
    # numpy and Python have the same generator: with one seed they would draw the same numbers.
    for_torch, for_numpy, for_python = (
        np.random.SeedSequence([seed % 2**64, step, rank, n]).generate_state(4) for n in range(3)
    )
    torch.manual_seed(int(for_torch[0]) << 32 | int(for_torch[1]))
    np.random.seed(for_numpy)
    random.seed(for_python.tobytes())


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _to_tensor(state: Any) -> torch.Tensor:
    if not isinstance(state, bytes):  # of a number, bytearray() would make as many zeros
        raise TypeError(f"the state of a generator is a {type(state).__name__}")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
