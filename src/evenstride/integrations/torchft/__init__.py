"""Live mode, experimental: the loss of a worker does not restart the others.

Live mode uses torchft (Linux x86-64, ``pip install 'evenstride[live]'``). Before every step
torchft's Lighthouse reports which workers take part. A vote keeps or drops each step. A worker that
rejoins gets its weights from one that trains. docs/how-to/torchft.md states what is promised and
what is not. Start with `live_run`, which implements `Coordinator`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from evenstride.errors import ConfigError

if TYPE_CHECKING:
    from evenstride.integrations.torchft.live_gradients import VotingOptimizer
    from evenstride.integrations.torchft.live_stride import LiveLoader, LiveStride

__all__ = ["LiveLoader", "LiveStride", "VotingOptimizer"]

_HOMES = {
    "LiveLoader": "live_stride",
    "LiveStride": "live_stride",
    "VotingOptimizer": "live_gradients",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("torchft") is None:
        raise ConfigError(
            "live mode needs torchft, which is not installed and has wheels for Linux x86-64 only: "
            "run pip install 'evenstride[live]', or let torchrun restart all workers instead"
        )
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
