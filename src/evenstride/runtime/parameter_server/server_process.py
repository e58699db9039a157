"""A parameter server's process: started by a worker, and gone when nobody needs it any more.

python -m evenstride.runtime.parameter_server.server_process

It reads its settings as a line of JSON from standard input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

from evenstride.core.sync_modes.mode_specs import Asynchronous, StaleSynchronous, sync_from_spec
from evenstride.runtime.parameter_server.rpc_agent import RpcRendezvous, join, server_name
from evenstride.runtime.parameter_server.server import Server, serve
from evenstride.runtime.parameter_server.work_dispatcher import WorkDispatcher

# How long a server stays unasked after the process that started it has gone: longer than a step.
_GRACE_S = 20.0
# How long the last worker to leave has to close its end of the connection first.
_LINGER_S = 0.3


def main() -> None:
    """Serve until all workers have left, or none asks and the one that started this has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    index = settings.pop("index")
    meeting = RpcRendezvous(**settings)
    mode = sync_from_spec(meeting.mode)
    free = isinstance(mode, Asynchronous | StaleSynchronous)
    bound = mode.staleness if isinstance(mode, StaleSynchronous) else None
    office = WorkDispatcher(meeting.workers, bound) if free and not index else None
    rate = mode.rate if isinstance(mode, Asynchronous | StaleSynchronous) else "constant"
    server = Server(meeting.workers, office, rate)
    serve(server)
    threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
    join(meeting, server_name(index), meeting.workers + index)
    server.deserted.wait()
    time.sleep(_LINGER_S)
    os._exit(0)  # agents of others may be gone, which RPC's own end would wait for


def _end_with_parent(server: Server) -> None:
    # Returns when the worker closes the pipe, or has ended in any way.
    sys.stdin.read()
    # Other workers may still need this server; it ends when none has called it for a while.
    calls = -1
    while not server.deserted.wait(_GRACE_S) and calls != server.calls:
        calls = server.calls
    os._exit(0)


if __name__ == "__main__":
    main()
