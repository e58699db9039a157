"""A sink that writes a folder of TensorBoard event files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from evenstride.runtime.sinks.snapshot import Snapshot, rows_of, tag_of

# Limits of TensorBoard's write queue: its number of events, and their delay.
_MOST_WAITING, _FLUSH_S = 1000, 10


class TensorBoardSink:
    """Writes one event with scalars for each snapshot, and alerts as text.

    The folder may be that of a resumed run, because steps count over the whole training.
    TensorBoard hides an earlier process's values of steps that are trained again.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import FileWriter

        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # fails here: the writer fails in its own thread
            pass
        make: Any = FileWriter
        self._writer = make(str(folder), _MOST_WAITING, _FLUSH_S)
        self._first = True

    def write(self, snapshot: Snapshot) -> None:
        """Queue the numbers for the writer's thread."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard.summary import text

        if self._first:
            self._restart_at(snapshot)
        for step, numbers in rows_of(snapshot):
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
            self._writer.add_summary(Summary(value=values), step, snapshot.unix_s)
        write: Any = text
        for alert in snapshot.alerts:
            event = write(tag_of("alert", alert.worker), alert.reason)
            self._writer.add_summary(event, snapshot.step, snapshot.unix_s)

    def _restart_at(self, snapshot: Snapshot) -> None:
        """Make TensorBoard hide an earlier process's values of later steps."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._first = False
        first = min([snapshot.step, *(found.step for found in snapshot.found)])
        log = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(session_log=log), first, snapshot.unix_s)

    def close(self) -> None:
        """Write the queued events, and close the file."""
        self._writer.close()
