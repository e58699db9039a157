"""Ports for servers that other processes start."""

from __future__ import annotations

import contextlib
import secrets
import socket

# Below the ports that Linux gives to clients, and to servers that ask for any port: another process
# could get one of those before the server binds it.
_PORTS = range(20_000, 29_000)


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Return different ports on which nothing listens."""
    ports = list[int]()
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            one, port = stack.enter_context(socket.socket()), secrets.choice(_PORTS)
            with contextlib.suppress(OSError):
                one.bind((address, port))
                ports.append(port)
    return ports
