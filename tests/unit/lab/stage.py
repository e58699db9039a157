"""A folder and the pipes between a test and the stand-ins for the lab's workers."""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from typing import Any

from evenstride.lab.processes.local_launch import Launch

STAND_IN = Path(__file__).with_name("stand_in.py")


def interpreter(folder: Path) -> Path:
    """Return a program, made in ``folder``, that plays Python for the lab's workers."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    program.chmod(0o755)
    return program


class Stage:
    """A folder and the pipes between a test and its workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.orders: dict[str, Any] = {"leash": str(folder / "leash")}
        os.mkfifo(folder / "leash")
        self.leash = os.open(folder / "leash", os.O_RDONLY | os.O_NONBLOCK)
        self._gate = -1

    def launch(self, *speeds: float, alone: bool = False, **values: Any) -> Launch:
        """Return a launch of the stand-in under the orders."""
        own = tuple({"OWN": f"of worker {worker}"} for worker in range(len(speeds)))
        values.setdefault("deadline_s", 60.0)
        environment = {"STAND_IN": json.dumps(self.orders), **values.pop("environment", {})}
        return Launch(
            ("train.py", "--lr", "0.1"),
            speeds,
            environment=environment,
            alone=own if alone else (),
            **values,
        )

    def gate(self) -> None:
        """Make workers wait until `open` is called."""
        self.orders["wait"] = str(self.folder / "gate")
        os.mkfifo(self.folder / "gate")
        self._gate = os.open(self.folder / "gate", os.O_RDWR)

    def open(self) -> None:
        """Let the workers that wait go on."""
        os.write(self._gate, b"now" * 10)

    def facts(self, worker: int) -> dict[str, Any]:
        """Return what a worker was given."""
        plain: dict[str, Any] = json.loads((self.folder / f"worker-{worker}.json").read_text())
        return plain

    def said(self) -> bytes:
        """Return what came through the leash, once no worker is left to hold it."""
        text = b""
        while select.select([self.leash], [], [], 30.0)[0]:
            piece = os.read(self.leash, 4096)
            if not piece:
                return text
            text += piece
        raise AssertionError("a worker is still running")

    def close(self) -> None:
        for pipe in (self.leash, self._gate):
            if pipe >= 0:
                os.close(pipe)
