"""A store server that outlives the ranks that use it."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import socket
from collections.abc import Iterator

from evenstride.errors import ConfigError

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def serve_store(host: str = LOOPBACK, port: int = 0) -> Iterator[tuple[str, int]]:
    """Serve a store on one address of this machine, and yield that address and the port.

    A store that binds its own socket listens on all addresses of the machine, without
    authentication. Port 0 selects a free port.

    Raises:
        ConfigError: the address is not a single one of this machine, or the port is in use.
    """
    with _listener(host, port) as listener:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        address, bound = listener.getsockname()[:2]
        serve = functools.partial(TCPStore, address, bound, None, True, wait_for_workers=False)
        try:
            # The store closes its copy of the socket; `listener` closes the original.
            store = serve(master_listen_fd=os.dup(listener.fileno()))
        except NotImplementedError:  # before torch 2.7 the libuv server accepts no socket
            store = serve(master_listen_fd=listener.detach(), use_libuv=False)
    yield str(address), int(bound)
    del store


def meeting_at(host: str, port: int) -> dict[str, str]:
    """Return the environment variables of ranks that use a store of `serve_store`.

    Without the last variable, rank 0 serves a store itself, which listens on all addresses.
    """
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot(host, port, error) from None
    if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified:
        listener.close()
        raise ConfigError(
            f"a store at {host}:{port} would listen on all interfaces without authentication; "
            "give the one address that the workers use"
        )
    try:
        # Without this, a restarted store would wait until the kernel releases the old port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise _cannot(host, port, error) from None
    return listener


def _cannot(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot serve a store at {host}:{port} ({error.strerror or error}); expected an address "
        "of this machine and a free port; give another one with --store HOST:PORT"
    )
