"""A store that outlives the workers which meet in it."""

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

    A store that binds for itself listens on every address of the machine, for whoever can reach it:
    it asks nobody for a password. Port 0 means a free one. Any other address, and a port that is
    taken, is a `ConfigError`.
    """
    with _listener(host, port) as listener:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        address, bound = listener.getsockname()[:2]
        serve = functools.partial(TCPStore, address, bound, None, True, wait_for_workers=False)
        try:
            # The store closes the socket that it gets; `listener` closes its own.
            store = serve(master_listen_fd=os.dup(listener.fileno()))
        except NotImplementedError:  # before torch 2.7 the newer kind of server takes no socket
            store = serve(master_listen_fd=listener.detach(), use_libuv=False)
    yield str(address), int(bound)
    del store


def meeting_at(host: str, port: int) -> dict[str, str]:
    """Return the variables of ranks that meet in a store of `serve_store`.

    Without the last one rank 0 serves a store itself, which listens on every address.
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
            f"a store at {host}:{port} would be open to whoever reaches this machine, and it asks "
            "nobody who they are; name the one address that the workers use"
        )
    try:
        # A store that is started again must not wait until the kernel forgets the old one.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise _cannot(host, port, error) from None
    return listener


def _cannot(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot serve a store at {host}:{port} ({error.strerror or error}); the address must be "
        "one of this machine, and the port free; name another one with --store HOST:PORT"
    )
