"""The stream that fails at a program's end otherwise behaves like the wrapped one."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from evenstride.errors import WorkerLost
from evenstride.runtime.checkpoint.endings import end_in_error, last_wait_s


class Stream(io.StringIO):
    """A stream that counts its flushes."""

    flushed = 0

    def flush(self) -> None:
        """Flush, and count it."""
        self.flushed += 1
        super().flush()


def test_output_is_flushed_before_the_error_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, error = Stream(), ValueError("not saved")
    monkeypatch.setattr(sys, "stdout", stream)

    end_in_error(error)
    print("the last words")
    with pytest.raises(ValueError, match="not saved") as raised:
        sys.stdout.flush()

    wrapped: Any = sys.stdout
    assert raised.value is error
    assert stream.flushed == 1
    assert stream.getvalue() == wrapped.getvalue() == "the last words\n"


def test_a_save_with_a_lost_rank_gets_a_short_wait() -> None:
    lost = (WorkerLost("rank 1 is gone"), RuntimeError("[gloo] Connection closed by peer"))

    assert all(last_wait_s(error) < last_wait_s(ValueError("bad")) for error in lost)
    assert last_wait_s(None) == last_wait_s(ValueError("bad"))
