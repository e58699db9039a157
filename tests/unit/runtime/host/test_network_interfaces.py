"""Addresses of this machine, and the interface on which parameter servers listen."""

from __future__ import annotations

import dataclasses
import socket

import pytest

from evenstride.errors import ConfigError
from evenstride.runtime.host import network_interfaces
from evenstride.runtime.host.network_interfaces import (
    ON_LOOPBACK,
    address_of,
    address_towards,
    interface_of,
    is_loopback,
    resolve,
)
from evenstride.runtime.parameter_server import rpc_agent
from evenstride.runtime.parameter_server.rpc_agent import RpcRendezvous, interface_for
from tests.messages import raises_message

OWN = {"127.0.0.1": "lo", "10.0.0.5": "eth0", "fd00::5": "eth0", "fe80::1": "eth1"}
MEETING = RpcRendezvous("head", 29400, "prefix", 2, 1, "asp", 60.0, one_machine=False)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two interfaces, and no variables that select one."""
    monkeypatch.setattr(network_interfaces, "own_addresses", lambda: OWN)
    monkeypatch.setattr(rpc_agent, "address_towards", lambda *_: "10.0.0.5")
    for name in ON_LOOPBACK:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("address", "loopback", "interface"),
    [
        ("127.0.0.1", True, "lo"),
        ("127.0.1.1", True, "lo"),
        ("10.0.0.5", False, "eth0"),
        ("fe80::1%eth1", False, "eth1"),
        ("::ffff:127.0.0.1", True, "lo"),
        ("10.0.0.6", False, None),
        ("0.0.0.0", False, None),
        ("::", False, None),
    ],
)
def test_the_reachability_and_the_interface_of_an_address(
    address: str, loopback: bool, interface: str | None
) -> None:
    assert is_loopback(address) is loopback
    assert interface_of(address) == interface


def test_the_first_address_of_an_interface() -> None:
    assert address_of("eth0") == "10.0.0.5"
    assert address_of("eth7") is None


def test_the_address_towards_another_machine_and_names_without_one() -> None:
    assert address_towards("127.0.0.1", 9) == "127.0.0.1"
    assert resolve("127.0.0.1") == "127.0.0.1"
    with raises_message(ConfigError):
        resolve("no such name")
    with raises_message(ConfigError):
        address_towards("no such name", 9)


def test_the_loopback_interface_in_the_ranks_variables_exists() -> None:
    assert ON_LOOPBACK["GLOO_SOCKET_IFNAME"] in {name for _, name in socket.if_nameindex()}


def test_parameter_servers_listen_on_loopback_on_one_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = dataclasses.replace(MEETING, one_machine=True)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")

    assert interface_for(alone) == "lo"
    monkeypatch.setenv("TP_SOCKET_IFNAME", "eth7")
    assert interface_for(alone) == "eth7", "the user's choice"


def test_parameter_servers_of_several_machines_listen_towards_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert interface_for(MEETING) == "eth0"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert interface_for(MEETING) == "eth1"
