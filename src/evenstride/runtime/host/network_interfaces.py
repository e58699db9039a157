"""Network addresses of this machine: their interfaces and whether others can reach them."""

from __future__ import annotations

import ipaddress
import socket
import sys

import psutil

from evenstride.errors import ConfigError

_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
ON_LOOPBACK = {
    "GLOO_SOCKET_IFNAME": _LOOPBACK,
    "TP_SOCKET_IFNAME": _LOOPBACK,
    "NCCL_SOCKET_IFNAME": f"={_LOOPBACK}",  # "=" matches the exact name, not a prefix
}
"""Environment variables that restrict the ports of ranks on one machine to loopback."""


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach an address; ``False`` for the wildcard address."""
    number = ipaddress.ip_address(address.partition("%")[0])
    return (getattr(number, "ipv4_mapped", None) or number).is_loopback


def own_addresses() -> dict[str, str]:
    """Return the interface of each address of this machine."""
    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def interface_of(address: str) -> str | None:
    """Return the interface with an address; all of 127.0.0.0/8 is on the loopback interface."""
    own = own_addresses()
    if is_loopback(address):
        own = {known: name for known, name in own.items() if is_loopback(known)}
        return own.get(address) or next(iter(own.values()), None)
    return own.get(address.partition("%")[0])


def address_of(interface: str) -> str | None:
    """Return the first address of an interface, as Gloo and TensorPipe do."""
    return next((a for a, name in own_addresses().items() if name == interface), None)


def resolve(host: str) -> str:
    """Return the address of a host name; raise `ConfigError` if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"cannot resolve the host {host!r} ({error.strerror or error}); give an IP address"
        ) from None
    return str(found[0][4][0])


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to another one, without sending anything.

    Raises:
        ConfigError: the name has no address, or there is no route to it.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # With UDP, connect only queries the kernel for the route.
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"this machine cannot reach {host} ({error.strerror or error}); give a reachable "
            "address"
        ) from None
