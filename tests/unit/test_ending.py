"""What a test started is gone once it was ended, whatever it thinks of that."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.ending import end

SCRIPT = """
import signal, subprocess, sys
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("begun", flush=True)
if sys.argv[1] != "over":
    child.wait()
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("how", "code"), [("willing", -signal.SIGTERM), ("deaf", -signal.SIGKILL), ("over", 0)]
)
def test_a_process_and_its_group_are_gone(how: str, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "begun\n"
        if how == "over":
            process.wait()
        end(process, 0.2 if how == "deaf" else 20.0)

        assert process.returncode == code
        assert process.stdout.read() == "", "its end comes once no process holds it any more"
