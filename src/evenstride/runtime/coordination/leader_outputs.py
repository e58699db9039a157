"""The leader's outputs: opens the trace and the sinks of the settings."""

from __future__ import annotations

import platform
import time
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from evenstride._version import __version__
from evenstride.core.diagnostics.alerts import Alerts
from evenstride.errors import ConfigError
from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.settings import Settings
from evenstride.runtime.sinks.sink_settings import open_sinks
from evenstride.runtime.sinks.telemetry_board import TelemetryBoard
from evenstride.trace.codec import TraceWriter
from evenstride.trace.read import TRACE_NAME


def open_records(leader: Leader, settings: Settings, world_size: int) -> None:
    """Connect the leader to sinks and trace; if one cannot be opened, close the others."""
    board = TelemetryBoard(open_sinks(settings.sinks), Alerts(settings.alert_below))
    try:
        leader.record_to(_open_trace(settings, world_size, leader))
    except ConfigError:
        board.close()
        raise
    leader.show_on(board)


def _open_trace(settings: Settings, world_size: int, leader: Leader) -> TraceWriter | None:
    if settings.trace is None:
        return None
    path = settings.trace
    path = path if path.suffix == ".jsonl" else path / TRACE_NAME
    try:
        return TraceWriter(path, _header(settings, world_size, leader))
    except OSError as error:
        raise ConfigError(f"the trace cannot be written to {path}: {error.strerror}") from None


def _header(settings: Settings, world_size: int, leader: Leader) -> dict[str, Any]:
    left_out = ("trace", "step_file", "sinks", "own_policy")
    names = [field.name for field in fields(settings) if field.name not in left_out]
    asked = {name: getattr(settings, name) for name in names}
    return {
        **asked,
        "world_size": world_size,
        "evenstride": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        # Taken at the same moment, so that they relate the trace's clock to calendar time.
        "at_s": round(leader.at_s, 6),
        "started_unix_s": round(time.time(), 6),
    }
