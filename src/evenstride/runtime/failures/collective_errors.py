"""Errors by which a rank learns that a collective has lost another."""

from __future__ import annotations

from evenstride.errors import EvenstrideError, WorkerLost

# Signs in an error's text that a collective, and not the user's own code, has failed.
_OF_COLLECTIVES = ("gloo", "nccl", "connection", "socket", "timed out", "timeout", "peer")


def is_of_collectives(error: BaseException | None) -> bool:
    """Return whether an exception is of the kind that the loss of another rank raises.

    With NCCL it may come wherever the program next needs the device, in any phase of a step.
    """
    if error is None or isinstance(error, EvenstrideError):
        return isinstance(error, WorkerLost)
    text = f"{type(error).__name__}: {error}".lower()
    return any(sign in text for sign in _OF_COLLECTIVES)
