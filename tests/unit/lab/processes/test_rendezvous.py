"""The rendezvous of ``evenstride launch``: what listens where, on one machine and on several."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from evenstride.errors import ConfigError
from evenstride.lab.processes import rendezvous
from evenstride.lab.processes.rendezvous import (
    BoundRendezvous,
    create,
    hosting_address,
    own_address,
)
from evenstride.lab.processes.torchrun import StoreEndpoint
from evenstride.runtime.host import network_interfaces
from tests.free_ports import free_ports
from tests.messages import raises_message

OWN = {"127.0.0.1": "lo", "10.0.0.5": "eth0", "192.168.0.5": "eth1", "::1": "lo"}
NAMES = {"head": "10.0.0.5", "me": "127.0.1.1", "other": "10.0.0.6", "localhost": "127.0.0.1"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two networks, whose own name stands for loopback, as on Debian."""

    def getaddrinfo(host: str, port: int | None, **_: Any) -> list[Any]:
        address = NAMES.get(host, host)
        if not address[0].isdigit():
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port))]

    monkeypatch.setattr(network_interfaces, "own_addresses", lambda: OWN)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(
        rendezvous,
        "address_towards",
        lambda host, _: "127.0.0.1" if host == "localhost" else "10.0.0.5",
    )


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("host", "given", "expected"),
    [
        ("head", None, "10.0.0.5"),
        ("10.0.0.5", None, "10.0.0.5"),
        ("other", None, None),
        ("not-started-yet", None, None),
        ("localhost", None, "127.0.0.1"),
        ("127.0.0.1", None, "127.0.0.1"),
        ("me", "192.168.0.5", "192.168.0.5"),
    ],
)
def test_the_machine_that_the_store_is_named_after_serves_it_on_that_address(
    host: str, given: str | None, expected: str | None
) -> None:
    assert hosting_address(host, given) == expected


@pytest.mark.usefixtures("machine")
def test_a_store_under_a_name_that_is_loopback_here_is_refused() -> None:
    with raises_message(ConfigError, "--store", "127.0.1.1", "--address"):
        hosting_address("me", None)


@pytest.mark.usefixtures("machine")
def test_a_machine_listens_on_the_address_given_or_on_the_one_towards_the_store() -> None:
    store = StoreEndpoint("head", 29400)

    assert own_address(None, store) == "10.0.0.5"
    assert own_address("192.168.0.5", store) == "192.168.0.5"
    assert own_address(None, StoreEndpoint("localhost", 29400)) == "127.0.0.1"
    assert own_address("localhost", StoreEndpoint("localhost", 29400)) == "127.0.0.1"


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    "given",
    ["other", "me", "nowhere"],
)
def test_an_address_that_others_cannot_reach_this_machine_at_is_refused(given: str) -> None:
    with raises_message(ConfigError):
        own_address(given, StoreEndpoint("head", 29400))


class Agents:
    """The agents of one job that have met, in whatever order they ask."""

    def __init__(self) -> None:
        self.store, self.rank = HashStore(), 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the place of the agent that asks."""
        return RendezvousInfo(self.store, self.rank, 2, RendezvousStoreInfo("0.0.0.0", 1))

    def shutdown(self) -> bool:
        """Return whether it is closed."""
        return True


def test_the_agent_of_rank_0_serves_a_new_store_for_each_round_on_its_address_alone() -> None:
    agents: Any = Agents()
    first, second = (
        BoundRendezvous(agents, address, contextlib.ExitStack())
        for address in ("127.0.0.1", "127.0.0.2")
    )
    rounds = []
    for _ in range(2):
        agents.rank = 0
        leader = first.next_rendezvous().bootstrap_store_info
        agents.rank = 1
        follower = second.next_rendezvous().bootstrap_store_info
        assert leader == follower
        assert leader is not None
        assert leader.master_addr == "127.0.0.1"
        rounds.append(leader.master_port)
        TCPStore(leader.master_addr, leader.master_port, None, False).set("key", "value")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", leader.master_port))

    assert rounds[0] != rounds[1]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", rounds[0]))
    assert first.use_agent_store
    assert first.shutdown()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", rounds[1]))


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that a rendezvous sets are unset, and restored afterwards."""
    for name in (*network_interfaces.ON_LOOPBACK, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def listening() -> set[tuple[str, int]]:
    """Return where this process listens."""
    import psutil

    found = psutil.Process().net_connections("tcp")
    return {c.laddr for c in found if c.status == psutil.CONN_LISTEN}


@pytest.mark.usefixtures("variables")
def test_on_one_machine_the_agents_need_no_port_and_ranks_listen_on_loopback() -> None:
    before = listening()
    made = create(RendezvousParameters("evenstride", rendezvous.ONE_MACHINE, "job", 1, 1))
    assert listening() == before

    met = made.next_rendezvous()

    ((address, port),) = listening() - before
    assert (address, met.bootstrap_store_info) == (
        "127.0.0.1",
        RendezvousStoreInfo("127.0.0.1", port),
    )
    assert {
        name: os.environ[name] for name in network_interfaces.ON_LOOPBACK
    } == network_interfaces.ON_LOOPBACK
    made.shutdown()
    assert listening() == before


@pytest.mark.usefixtures("variables")
def test_an_interface_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")

    create(RendezvousParameters("evenstride", rendezvous.ONE_MACHINE, "job", 1, 1)).shutdown()

    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.usefixtures("variables")
def test_several_agents_meet_at_the_store_which_one_of_them_serves_on_its_address_alone() -> None:
    (port,) = free_ports(1, "127.0.0.2")
    before = listening()
    settings = {"read_timeout": "10", "last_call_timeout": "1"}
    parameters = RendezvousParameters(
        "evenstride", f"127.0.0.2:{port}", "job", 1, 2, "127.0.0.3", **settings
    )
    first, second = create(parameters), create(parameters)

    assert listening() - before == {("127.0.0.2", port)}, "one serves it, the other is a client"
    met = first.next_rendezvous()
    assert met.bootstrap_store_info is not None
    assert met.bootstrap_store_info.master_addr == "127.0.0.3"
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["TP_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in os.environ, "NCCL finds the fastest network itself"
    for made in (second, first):
        made.shutdown()


@pytest.mark.usefixtures("variables")
def test_a_store_that_does_not_answer_is_named() -> None:
    (port,) = free_ports(1)
    settings = {"is_host": "0", "read_timeout": "1"}
    parameters = RendezvousParameters("evenstride", f"127.0.0.1:{port}", "job", 1, 2, **settings)

    with raises_message(ConfigError, "127.0.0.1", port, "1 s"):
        create(parameters)
