"""The trace of a run: events and decisions as versioned JSON lines.

Start with `codec` for the format, `read` for records and `run_log` for whole runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenstride._importing import later

if TYPE_CHECKING:
    from evenstride.trace.decision_replay import Replay, replay
    from evenstride.trace.read import read_noise, read_records, trace_path
    from evenstride.trace.run_log import MeasuredStep, TrainingHistory, read_course

__all__ = [
    "MeasuredStep",
    "Replay",
    "TrainingHistory",
    "read_course",
    "read_noise",
    "read_records",
    "replay",
    "trace_path",
]

__getattr__ = later(
    __name__,
    {
        "run_log": ("MeasuredStep", "TrainingHistory", "read_course"),
        "read": ("read_noise", "read_records", "trace_path"),
        "decision_replay": ("Replay", "replay"),
    },
)
