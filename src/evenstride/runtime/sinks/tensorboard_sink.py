"""A sink that is a folder of TensorBoard's events."""

from __future__ import annotations

import tempfile
from hashlib import blake2s
from itertools import groupby
from pathlib import Path
from re import sub
from typing import Any

from evenstride.runtime.sinks.snapshot import BY_NAME, Sample, Snapshot

# Events that may wait for the thread that writes them, and how long they may.
_MOST_WAITING, _FLUSH_S = 1000, 10


class TensorBoardSink:
    """Writes scalars, and alerts as text, one event for each snapshot.

    A folder may be that of a run that is continued: its steps are those of the whole training, and
    what an earlier process told of steps that are trained again is hidden by TensorBoard.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import FileWriter

        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # the writer tells only from a thread of its own
            pass
        make: Any = FileWriter
        self._writer = make(str(folder), _MOST_WAITING, _FLUSH_S)
        self._first = True

    def write(self, snapshot: Snapshot) -> None:
        """Hand the numbers to the thread that writes them."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard.summary import text

        if self._first:
            self._restart_at(snapshot)
        numbers = [sample for sample in snapshot.samples if sample.metric != "metric"]
        if snapshot.epochs is not None:
            numbers.append(Sample("epochs", "", snapshot.epochs))
        values = [Summary.Value(tag=_tag(m, label), simple_value=v) for m, label, v in numbers]
        if values:
            self._writer.add_summary(Summary(value=values), snapshot.step, snapshot.unix_s)
        for step, found in groupby(snapshot.found, key=lambda one: one.step):
            values = [
                Summary.Value(tag=_tag("metric", f.name), simple_value=f.value) for f in found
            ]
            self._writer.add_summary(Summary(value=values), step, snapshot.unix_s)
        write: Any = text
        for alert in snapshot.alerts:
            told = write(_tag("alert", alert.worker), alert.reason)
            self._writer.add_summary(told, snapshot.step, snapshot.unix_s)

    def _restart_at(self, snapshot: Snapshot) -> None:
        """Let what another process told of later steps be hidden."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._first = False
        first = min([snapshot.step, *(found.step for found in snapshot.found)])
        log = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(session_log=log), first, snapshot.unix_s)

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._writer.close()


def _tag(metric: str, label: str) -> str:
    """Return TensorBoard's name: all numbers of a kind in one group, in the letters it allows.

    A label that has others, too, gets a part of its hash: ``acc@1`` and ``acc 1`` stay apart.
    """
    if metric in BY_NAME and not BY_NAME[metric].label:
        return f"evenstride/{metric}"
    allowed = sub(r"[^-/\w.]", "_", label)
    if allowed != label:
        allowed += (
            f"-{blake2s(label.encode('utf-8', 'backslashreplace'), digest_size=3).hexdigest()}"
        )
    return f"evenstride_{metric}/{allowed}"
