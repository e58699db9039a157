"""Signals as notices, each in its own process with a deadline."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from evenstride.runtime.notices import NoticeWatcher, Signals
from tests.messages import check_message

# The beginning of each script. `raise_signal` runs the C-level handler before it returns, so bytes
# are in the pipe in the order of the calls.
PRELUDE = """
import ctypes, os, queue, select, signal, sys, threading
from signal import SIGHUP, SIGTERM, SIGUSR1, SIGUSR2, raise_signal
from evenstride.runtime.notices import Gcp, NoticeWatcher, Signals

for number in (SIGHUP, SIGTERM, SIGUSR1, SIGUSR2):
    signal.signal(number, signal.SIG_DFL)  # under nohup, one of them is inherited as ignored

calls = queue.Queue()
now_s = 0.0

def watch(graces, *others):
    source = Signals(graces, clock=lambda: 1000.0, steady=lambda: now_s)
    return NoticeWatcher([source, *others], calls.put)

def reported():
    notice = calls.get(timeout=50)
    print("reported", notice.source, notice.leaves_unix_s, flush=True)
    return notice

def say(number, frame):
    print("former", signal.Signals(number).name, flush=True)
"""


def run(script: str) -> tuple[list[str], int, str]:
    """Return the printed lines, the exit code and the log of a script."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.splitlines(), done.returncode, done.stderr


def test_a_signal_is_a_notice_while_the_main_thread_is_blocked() -> None:
    # The shell sends the signal itself, so the main thread is blocked in the C library's `system`,
    # which ignores signals and returns only after the notice has been reported.
    lines, code, log = run(
        """
        signal.signal(SIGTERM, say)
        watcher = watch({SIGTERM: 30.0})
        go, let_go = os.pipe()
        os.set_inheritable(go, True)

        def listen():
            reported()
            os.write(let_go, b"go on\\n")

        threading.Thread(target=listen).start()
        ctypes.CDLL(None).system(b"kill -TERM %d; read word < /dev/fd/%d" % (os.getpid(), go))
        print("back", flush=True)
        watcher.close()
        """
    )

    assert code == 0, log
    assert lines[0] == "reported SIGTERM 1030.0"
    assert sorted(lines[1:]) == ["back", "former SIGTERM"]


def test_a_late_python_handler_is_not_a_second_signal() -> None:
    lines, code, log = run(
        """
        watcher = watch({SIGTERM: 30.0, SIGUSR1: 5.0})
        go, let_go = os.pipe()
        os.set_inheritable(go, True)

        def listen():
            global now_s
            reported()
            now_s = 10.0
            os.write(let_go, b"go on\\n")

        thread = threading.Thread(target=listen)
        thread.start()
        ctypes.CDLL(None).system(b"kill -TERM %d; read word < /dev/fd/%d" % (os.getpid(), go))
        thread.join()
        raise_signal(SIGUSR1)
        reported()
        watcher.close()
        """
    )

    assert (lines, code) == (["reported SIGTERM 1030.0", "reported SIGUSR1 1005.0"], 0), log


def test_a_second_signal_ends_a_blocked_process() -> None:
    lines, code, log = run(
        """
        watch({SIGTERM: 30.0})
        go, let_go = os.pipe()
        os.set_inheritable(go, True)
        os.set_inheritable(let_go, False)

        def listen():
            global now_s
            reported()
            now_s = 10.0
            os.write(let_go, b"go on\\n")

        threading.Thread(target=listen).start()
        ctypes.CDLL(None).system(
            b"kill -TERM %d; exec 3< /dev/fd/%d; read word <&3; kill -TERM %d; read word <&3"
            % (os.getpid(), go, os.getpid())
        )
        print("back", flush=True)
        """
    )

    assert lines == ["reported SIGTERM 1030.0"], log
    assert code == -signal.SIGTERM
    check_message(log, "SIGTERM")


def test_the_time_for_repeats_counts_from_the_first_signal() -> None:
    lines, code, log = run(
        """
        watcher = watch({SIGTERM: 30.0, SIGUSR1: 5.0})
        raise_signal(SIGTERM)
        reported()
        now_s = 2.0
        raise_signal(SIGTERM)
        raise_signal(SIGUSR1)
        reported()
        now_s = 4.0
        raise_signal(SIGTERM)
        threading.Event().wait(50)
        """
    )

    assert (lines, code) == (
        ["reported SIGTERM 1030.0", "reported SIGUSR1 1005.0"],
        -signal.SIGTERM,
    ), log


def test_only_a_second_sigterm_ends_a_process() -> None:
    lines, code, log = run(
        """
        watcher = watch({SIGUSR1: 5.0, SIGUSR2: 3.0})
        raise_signal(SIGUSR1)
        reported()
        now_s = 10.0
        raise_signal(SIGUSR1)
        raise_signal(SIGUSR2)
        reported()
        watcher.close()
        """
    )

    assert (lines, code) == (["reported SIGUSR1 1005.0", "reported SIGUSR2 1003.0"], 0), log


@pytest.mark.parametrize(("later_s", "ends"), [(0.5, False), (2.9, False), (3.5, True)])
def test_two_signals_within_seconds_are_one(later_s: float, ends: bool) -> None:
    lines, code, log = run(
        f"""
        watcher = watch({{SIGTERM: 30.0, SIGUSR1: 5.0}})
        raise_signal(SIGTERM)
        reported()
        now_s = {later_s}
        raise_signal(SIGTERM)
        raise_signal(SIGUSR1)
        reported()
        watcher.close()
        """
    )

    assert lines[0] == "reported SIGTERM 1030.0"
    assert (lines[1:] == ["reported SIGUSR1 1005.0"]) is not ends, log
    assert code == (-signal.SIGTERM if ends else 0)


def test_previous_handlers_are_still_called() -> None:
    lines, code, log = run(
        """
        signal.signal(SIGTERM, say)
        watcher = watch({SIGTERM: 30.0, SIGUSR1: 5.0})
        raise_signal(SIGTERM)
        reported()
        now_s = 60.0
        raise_signal(SIGTERM)  # it is processed before the next one is reported
        raise_signal(SIGUSR1)
        reported()
        watcher.close()
        assert signal.getsignal(SIGTERM) is say
        raise_signal(SIGTERM)
        print(calls.empty())
        """
    )

    assert code == 0, log
    assert sorted(lines[:2]) == ["former SIGTERM", "reported SIGTERM 1030.0"]
    assert lines[2:] == ["former SIGTERM", "reported SIGUSR1 1005.0", "former SIGTERM", "True"]


def test_closing_restores_everything() -> None:
    lines, code, log = run(
        """
        pipes = lambda: [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 64)
                         if os.path.exists(f"/proc/self/fd/{fd}")]

        before = pipes()
        watcher = watch({SIGTERM: 30.0, SIGUSR1: None})
        assert pipes() != before

        watcher.close()
        watcher.close()
        assert pipes() == before, pipes()
        assert signal.set_wakeup_fd(-1) == -1
        assert signal.getsignal(SIGUSR1) is signal.getsignal(SIGTERM) is signal.SIG_DFL
        assert threading.active_count() == 1
        print("restored", flush=True)
        raise_signal(SIGTERM)
        print("not reached")
        """
    )

    assert lines == ["restored"], log
    assert code == -signal.SIGTERM


def test_closing_keeps_a_handler_that_was_installed_later() -> None:
    lines, code, log = run(
        """
        watcher = watch({SIGTERM: 30.0, SIGUSR1: 5.0})
        ours = signal.getsignal(SIGTERM)
        signal.signal(SIGTERM, lambda *args: (say(*args), ours(*args)))
        raise_signal(SIGTERM)
        reported()
        now_s = 60.0
        raise_signal(SIGTERM)  # who came after us does not want to end
        raise_signal(SIGUSR1)
        reported()
        watcher.close()
        raise_signal(SIGTERM)
        """
    )

    assert code == 0, log
    assert sorted(lines) == [
        *["former SIGTERM"] * 3,
        "reported SIGTERM 1030.0",
        "reported SIGUSR1 1005.0",
    ]


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    lines, code, log = run(
        """
        signal.signal(SIGTERM, signal.SIG_IGN)
        watcher = watch({SIGTERM: 30.0, SIGUSR1: 50.0})
        assert signal.getsignal(SIGTERM) is signal.SIG_IGN
        raise_signal(SIGTERM)
        raise_signal(SIGUSR1)
        reported()
        watcher.close()
        assert signal.getsignal(SIGTERM) is signal.SIG_IGN
        """
    )

    assert (lines, code) == (["reported SIGUSR1 1050.0"], 0), log


def test_other_signals_are_not_notices() -> None:
    lines, code, log = run(
        """
        for number in (SIGUSR2, signal.SIGINT, signal.SIGRTMIN + 3):
            signal.signal(number, lambda number, frame: print("theirs", number, flush=True))
        watcher = watch({SIGTERM: 30.0, SIGHUP: 1.0})
        for number in (SIGUSR2, signal.SIGINT, signal.SIGRTMIN + 3, SIGTERM, SIGHUP):
            raise_signal(number)
        while reported().source != "SIGHUP":
            pass
        watcher.close()
        """
    )

    assert code == 0, log
    assert [line for line in lines if line.startswith("theirs")] == [
        f"theirs {number}" for number in (12, 2, 37)
    ]
    assert lines[-1] == "reported SIGHUP 1001.0"
    assert "no notice" not in log


def test_the_default_action_returns_after_close_on_another_thread() -> None:
    lines, code, log = run(
        """
        watcher = watch({SIGTERM: 30.0})
        thread = threading.Thread(target=watcher.close)
        thread.start()
        thread.join()
        print("closed", flush=True)
        raise_signal(SIGTERM)
        print("not reached")
        """
    )

    assert lines == ["closed"], log
    assert code == -signal.SIGTERM
    check_message(log)


def test_a_handler_of_another_language_is_kept() -> None:
    lines, code, log = run(
        """
        kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
        theirs = kind(lambda number: print("C", number, flush=True))
        library = ctypes.CDLL(None)
        library.signal.argtypes = [ctypes.c_int, kind]
        library.signal(int(SIGUSR1), theirs)
        was = signal.getsignal
        signal.getsignal = lambda number: None if number == SIGUSR1 else was(number)
        watcher = watch({SIGUSR1: 30.0})
        raise_signal(SIGUSR1)
        watcher.close()
        """
    )

    assert (lines, code) == (["C 10"], 0), log
    assert "SIGUSR1 is not watched" in log


def test_signals_are_not_watched_from_another_thread(caplog: pytest.LogCaptureFixture) -> None:
    former = signal.getsignal(signal.SIGUSR1)

    def watch() -> None:
        NoticeWatcher([Signals({signal.SIGUSR1: None})], print).close()

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()

    assert signal.getsignal(signal.SIGUSR1) is former
    check_message(caplog.messages)
