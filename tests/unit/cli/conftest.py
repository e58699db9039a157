"""The command line as its users have it, inside this process."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from evenstride.cli.main import main


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command came to."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Return the one JSON object on stdout, which must be all there is."""
        assert self.out.endswith("\n") and self.out.count("\n") == 1, self.out
        plain = json.loads(self.out)
        assert isinstance(plain, dict)
        return plain

    def refusal(self) -> str:
        """Return the one line on stderr, with nothing on stdout and exit code 2."""
        assert (self.code, self.out) == (2, ""), self
        assert self.err.startswith("evenstride: ") and self.err.count("\n") == 1, self.err
        return self.err


Shell = Callable[..., Answer]


@pytest.fixture
def shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Shell]:
    """Call ``evenstride`` with arguments, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def call(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["evenstride", *arguments])
        capsys.readouterr()
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        else:
            code = 0
        text = capsys.readouterr()
        return Answer(code, text.out, text.err)

    yield call
    for number, handler in handlers.items():  # those of the tests, not of the command
        signal.signal(number, handler)
