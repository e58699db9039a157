"""Run torchrun with stores that listen on one address only.

python -m evenstride.lab.processes.rendezvous SCRIPT ...

torchrun itself starts two servers that listen on every address of a machine: the store of its
agents, whose content the agents unpickle, and the store of the process group, in rank 0. This
module runs torchrun with another rendezvous. On one machine, the agent's store is an object without
a port, and the process group's store listens on loopback. On several machines, both listen on the
address that the user gives.
"""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import timedelta

from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from evenstride.errors import ConfigError
from evenstride.lab.processes.torchrun import StoreEndpoint, parse_store
from evenstride.runtime.host.network_interfaces import (
    ON_LOOPBACK,
    address_towards,
    interface_of,
    is_loopback,
    resolve,
)
from evenstride.runtime.store.store_server import LOOPBACK, serve_store

BACKEND = "evenstride"
ONE_MACHINE = "localhost:0"
"""The endpoint for a job on one machine, as with torchrun's ``--standalone``."""

_REFUSED = 2
_STORE_KEY = "evenstride/store"
# Without this variable, torch's handler opens another store, on every address.
_NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class BoundRendezvous(RendezvousHandler):
    """A rendezvous whose agent of rank 0 serves a new store for the process group in each round.

    In the store of an earlier round, workers would wait for ever. ``inner`` finds the other agents.
    ``resources`` are closed at shutdown.
    """

    def __init__(
        self, inner: RendezvousHandler, address: str, resources: contextlib.ExitStack
    ) -> None:
        self._inner, self._address, self._resources = inner, address, resources
        self._round = resources.enter_context(contextlib.ExitStack())

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other agents and agree on the store of the process group."""
        met = self._inner.next_rendezvous()
        self._round.close()
        if met.rank == 0:
            host, port = self._round.enter_context(serve_store(self._address))
            met.store.set(_STORE_KEY, str(StoreEndpoint(host, port)))
        store = parse_store(bytes(met.store.get(_STORE_KEY)).decode())
        meeting = RendezvousStoreInfo(store.host, store.port)
        return RendezvousInfo(met.store, met.rank, met.world_size, meeting)

    def get_backend(self) -> str:
        return BACKEND

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        done = self._inner.shutdown()
        self._resources.close()
        return done


def create(params: RendezvousParameters) -> BoundRendezvous:
    """Return the rendezvous for torchrun's arguments."""
    resources = contextlib.ExitStack()
    store: Store
    interfaces = ON_LOOPBACK
    if params.endpoint == ONE_MACHINE:
        store, address = HashStore(), LOOPBACK
    else:
        endpoint = parse_store(params.endpoint)
        store = _agents_store(params, endpoint, resources)
        address = own_address(params.local_addr, endpoint)
        # NCCL itself chooses the fastest network, and listens on its address only.
        interface = str(interface_of(address))
        interfaces = {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface}
    chosen = {name for name in interfaces if os.environ.get(name)}
    os.environ.update({k: v for k, v in interfaces.items() if k not in chosen})
    os.environ[_NO_SHARED_STORE] = "1"
    inner = create_handler(store, C10dRendezvousBackend(store, params.run_id), params)
    return BoundRendezvous(inner, address, resources)


def _agents_store(
    params: RendezvousParameters, endpoint: StoreEndpoint, resources: contextlib.ExitStack
) -> TCPStore:
    """Return a client of the agents' store; serve the store if it is on this machine."""
    where, refused = (endpoint.host, endpoint.port), None
    address = None
    if params.get_as_bool("is_host") is not False:
        address = hosting_address(endpoint.host, params.local_addr)
    if address is not None:
        try:
            where = resources.enter_context(serve_store(address, endpoint.port))
        except ConfigError as error:  # another agent on this machine may already serve it
            refused = error
    timeout = timedelta(seconds=params.get_as_int("read_timeout", 60) or 60)
    try:
        return TCPStore(*where, None, False, timeout)
    except RuntimeError as error:
        raise ConfigError(
            f"the store at {endpoint} did not answer within {timeout.total_seconds():.0f} s; start "
            f"the machine that serves it, and open its port to this machine ({refused or error})"
        ) from None


def hosting_address(host: str, given: str | None) -> str | None:
    """Return the address on which this machine serves the store at ``host``.

    ``None`` if ``host`` is another machine. A name that resolves to loopback is refused, because
    other machines cannot reach it.
    """
    try:
        address = resolve(host)
    except ConfigError:  # for example, the machine has not started yet
        return None
    if is_loopback(address) and host not in (address, "localhost"):
        if given is None:
            raise ConfigError(
                f"--store {host} is {address} on this machine, which no other machine can reach; "
                "give the machine's IP address to --store, or add --address with it here"
            )
        address = resolve(given)
    return None if interface_of(address) is None else address


def own_address(given: str | None, store: StoreEndpoint) -> str:
    """Return this machine's address for the others: the given one, or that towards the store."""
    towards = address_towards(store.host, store.port)
    if given is None:
        return towards
    address = resolve(given)
    unreachable = is_loopback(address) and not is_loopback(towards)
    if unreachable or interface_of(address) is None:
        what = "only this machine can reach it" if unreachable else "this machine does not have it"
        raise ConfigError(
            f"--address {given} is {address}, but {what}; remove --address to use {towards}, the "
            "address from which this machine reaches the store"
        )
    return address


def main(arguments: list[str]) -> None:
    """Run torchrun with this rendezvous, on one machine unless the arguments give a store."""
    rendezvous_handler_registry.register(BACKEND, create)
    try:
        torchrun.main([f"--rdzv-backend={BACKEND}", f"--rdzv-endpoint={ONE_MACHINE}", *arguments])
    except ConfigError as error:
        sys.stderr.write(f"evenstride: {error}\n")
        sys.exit(_REFUSED)


if __name__ == "__main__":
    main(sys.argv[1:])
