"""The process of a parameter server: a worker starts it, and it ends when it is no longer needed.

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

# How long a server waits for calls after its own worker has ended: longer than a step.
_GRACE_S = 20.0
# The time for the last worker to close its end of the connection first.
_LINGER_S = 0.3


def main() -> None:
    """Serve until all workers have left, or until this server's worker is gone and calls cease."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    index = settings.pop("index")
    rendezvous = RpcRendezvous(**settings)
    mode = sync_from_spec(rendezvous.mode)
    free = isinstance(mode, Asynchronous | StaleSynchronous)
    bound = mode.staleness if isinstance(mode, StaleSynchronous) else None
    dispatcher = WorkDispatcher(rendezvous.workers, bound) if free and not index else None
    rate = mode.rate if isinstance(mode, Asynchronous | StaleSynchronous) else "constant"
    server = Server(rendezvous.workers, dispatcher, rate)
    serve(server)
    threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
    join(rendezvous, server_name(index), rendezvous.workers + index)
    server.deserted.wait()
    time.sleep(_LINGER_S)
    os._exit(0)  # RPC's own shutdown would wait for other agents, which may be gone


def _end_with_parent(server: Server) -> None:
    # Returns when the worker closes the pipe or ends.
    sys.stdin.read()
    # Other workers may still need this server; it ends after a while without calls.
    calls = -1
    while not server.deserted.wait(_GRACE_S) and calls != server.calls:
        calls = server.calls
    os._exit(0)


if __name__ == "__main__":
    main()
