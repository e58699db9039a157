"""How a program that saves ends: by an exception, or with an exit code that says what is wrong."""

from __future__ import annotations

import sys
from typing import Any

from evenstride.runtime.failures.collective_errors import is_of_collectives

# How long an end by an exception waits for the save that is going on: others may be gone. Where
# the exception says so, it could end well only if all that was missing was rank 0's manifest.
_LAST_WAIT_S, _LOST_WAIT_S = 10.0, 2.0


def last_wait_s(error: BaseException | None) -> float:
    """Return how long a program that ends by an exception waits for a save, in seconds."""
    return _LOST_WAIT_S if is_of_collectives(error) else _LAST_WAIT_S


class _Unflushable:
    """A stream that cannot be flushed, and otherwise is another one."""

    def __init__(self, stream: Any, error: Exception) -> None:
        self._stream, self._error = stream, error

    def flush(self) -> None:
        """Flush the stream, and say what is wrong."""
        self._stream.flush()
        # Where it was raised first is of no use to people: nothing has crashed.
        raise self._error.with_traceback(None)

    def __repr__(self) -> str:
        """Return what Python names as the place of the error, when it shows that one."""
        return "evenstride: the newest state is unsaved, hence exit code 120"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def end_in_error(error: Exception) -> None:
    """Let this program, which is ending, end with exit code 120; for functions called at exit.

    The exit code is settled by then, but for one case: where the standard output cannot be
    flushed at the very end, Python ends with 120 (documented with `sys.exit`). So everything
    else that is to be done at exit is still done, unlike with `os._exit`; the interpreter shows
    the error as one that it ignores.
    """
    sys.stdout = _Unflushable(sys.stdout, error)
