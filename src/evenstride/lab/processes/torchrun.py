"""Build the torchrun command for elastic jobs, with a reason for each setting.

This module starts no process and does not import torch. The settings are those that
``torch/distributed/elastic/rendezvous`` of torch 2.6 and 2.13 reads. ``docs/how-to/elastic.md`` has
measurements of their effect.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from evenstride.errors import ConfigError

DEFAULT_PORT = 29400
"""Default port of a store, as in torchrun."""

SPOT_RESTARTS, RESTARTS = 1000, 3

_RENDEZVOUS_S = {
    # Time to wait for more nodes once the minimum is there. The default of 30 s would delay every
    # restart with fewer nodes than the maximum.
    "last_call_timeout": 3,
    # A node counts as dead after 5 times 1 s without a heartbeat, instead of 3 times 5 s.
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 5,
    # Longest time of one request to the store.
    "read_timeout": 60,
}
_JOIN_S, _SPOT_JOIN_S = 600, 3600
# Enough time for a checkpoint, within the 30 s that most spot machines have after a notice.
_SPOT_SHUTDOWN_S = 20

_HOST = re.compile(r"\[(?P<bracketed>[0-9A-Fa-f:.%]+)\]|(?P<plain>[\w.-]+)")
_NODES = re.compile(r"([0-9]+)(?::([0-9]+))?")
_EVERYWHERE = ipaddress.IPv4Address(0)


@dataclass(frozen=True, slots=True)
class Offers:
    """Options of the installed torchrun that not all supported versions have."""

    shutdown: bool = True  # ``--shutdown-timeout``
    signals: bool = True  # ``--signals-to-handle``
    keep_alive: bool = True  # ``keep_alive_interval`` and ``keep_alive_max_attempt``


@dataclass(frozen=True, slots=True)
class StoreEndpoint:
    """Where a store is: host and port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Request:
    """The request for a torchrun command."""

    command: tuple[str, ...]  # script and arguments
    nodes: tuple[int, int] = (1, 1)  # fewest and most machines
    # Workers per machine, or devices that torchrun counts: ``auto``, ``gpu``, ``cpu``.
    per_node: str = "auto"
    store: StoreEndpoint | None = None  # of all machines of the job
    name: str = "evenstride"  # of the job, the same on all machines
    spot: bool = False  # whether machines may be preempted
    restarts: int | None = None  # most restarts; ``None`` for the default
    # Address of this machine for the others; ``None`` for the one towards the store.
    address: str | None = None


@dataclass(frozen=True, slots=True)
class Torchrun:
    """A command."""

    arguments: tuple[str, ...]  # of ``python -m evenstride.lab.processes.rendezvous``
    notes: tuple[str, ...]  # sentences for the user


def parse_nodes(text: str) -> tuple[int, int]:
    """Return the fewest and the most nodes of ``4`` or ``1:4``."""
    found = _NODES.fullmatch(text.strip())
    fewest, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= fewest <= most:
        raise ConfigError(
            f"invalid --nodes {text!r}: expected a number of machines, such as 4, or the fewest "
            "and the most, such as 1:4"
        )
    return fewest, most


def parse_per_node(text: str) -> str:
    """Return the number of workers per machine, as torchrun reads it."""
    if text in ("auto", "gpu", "cpu") or (text.isascii() and text.isdecimal() and int(text) > 0):
        return text
    raise ConfigError(
        f"invalid --per-node {text!r}: expected the workers per machine, such as 2, or auto, gpu "
        "or cpu"
    )


def parse_store(text: str) -> StoreEndpoint:
    """Return the endpoint of ``HOST``, ``HOST:PORT`` or ``[IPV6]:PORT``."""
    host, port = _HOST.match(text), ""
    if host is not None:
        port = text[host.end() :]
    if host is not None and re.fullmatch(r"|:[0-9]{1,5}", port):
        number = int(port[1:] or DEFAULT_PORT)
        if 0 < number < 65536:
            endpoint = StoreEndpoint(host["bracketed"] or host["plain"], number)
            _refuse_if_everywhere(endpoint.host)
            return endpoint
    raise ConfigError(
        f"invalid --store {text!r}: expected a host name or address, and a port if it is not "
        f"{DEFAULT_PORT}, such as head, head:29500 or [fd00::1]:29500"
    )


def _refuse_if_everywhere(host: str) -> None:
    """Refuse 0.0.0.0 and other wildcard addresses, without resolving names."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        try:
            address = ipaddress.ip_address(socket.inet_aton(host))  # "0" is 0.0.0.0, too
        except OSError:
            return
    if address.is_unspecified or getattr(address, "ipv4_mapped", None) == _EVERYWHERE:
        raise ConfigError(
            f"--store {host} stands for every address of a machine: workers cannot connect to it, "
            "and the store would be open to every machine that reaches this one; give the one "
            "address that all machines of the job can reach"
        )


def offers_of_torch() -> Offers:
    """Return the options of the installed torchrun, from its source; torch is not imported."""
    try:
        torch = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return Offers()

    def says(path: str, word: str) -> bool:
        try:
            return word in str(torch.locate_file(path).read_text())
        except OSError:
            return False

    run = "torch/distributed/run.py"
    rendezvous = "torch/distributed/elastic/rendezvous/dynamic_rendezvous.py"
    return Offers(
        shutdown=says(run, "--shutdown-timeout"),
        signals=says(run, "--signals-to-handle"),
        keep_alive=says(rendezvous, 'get_as_int("keep_alive_interval"'),
    )


def torchrun(request: Request, offers: Offers | None = None) -> Torchrun:
    """Return the command for this machine; it is the same on every machine of the job.

    Without ``offers``, all options are used.
    """
    offers = offers or Offers()
    alone = request.nodes[1] == 1
    if not alone and request.store is None:
        raise ConfigError(
            f"up to {request.nodes[1]} machines need a store to find each other. Add --store with "
            "the name of the first machine. If machines may be preempted, serve the store on "
            "another one (evenstride launch --store-only --store HOST:PORT) and add --store "
            "HOST:PORT --spot on every machine"
        )
    arguments = [
        f"--nproc-per-node={request.per_node}",
        f"--max-restarts={_restarts(request)}",
    ]
    if request.store is None:
        arguments = ["--nnodes=1", *arguments]
    else:
        arguments = [*_meeting(request, request.store, offers), *arguments]
        if request.address is not None:
            arguments.append(f"--local-addr={request.address}")
    if offers.signals:
        arguments.append("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2")
    if offers.shutdown and request.spot:
        arguments.append(f"--shutdown-timeout={_SPOT_SHUTDOWN_S}")
    return Torchrun((*arguments, *request.command), _notes(request, offers))


def _restarts(request: Request) -> int:
    if request.restarts is not None:
        return request.restarts
    return SPOT_RESTARTS if request.spot else RESTARTS


def _meeting(request: Request, store: StoreEndpoint, offers: Offers) -> list[str]:
    """Return the arguments of the rendezvous."""
    fewest, most = request.nodes
    settings: Mapping[str, int] = {
        **({"is_host": 0} if request.spot else {}),
        "join_timeout": _SPOT_JOIN_S if request.spot else _JOIN_S,
        **_RENDEZVOUS_S,
    }
    pairs = [f"{k}={v}" for k, v in settings.items() if offers.keep_alive or "keep_alive" not in k]
    return [
        f"--nnodes={fewest}:{most}",
        f"--rdzv-endpoint={store}",
        f"--rdzv-id={request.name}",
        f"--rdzv-conf={','.join(pairs)}",
    ]


def _notes(request: Request, offers: Offers) -> tuple[str, ...]:
    notes = []
    store = request.store
    if store is None and request.address is not None:
        notes.append(
            f"--address {request.address} has no effect: on one machine, all ports listen on "
            "loopback."
        )
    if store is None and request.spot:
        notes.append(
            "The job ends when its only machine is preempted. Start it again to continue from the "
            "last checkpoint. Or give --nodes 1:2 and a --store on another machine, so that a "
            "second machine can take over."
        )
    elif store is not None and request.spot:
        notes.append(
            f"Serve the store at {store}, on a machine that is not preempted: "
            f"evenstride launch --store-only --store {store}"
        )
    elif store is not None:
        notes.append(
            f"The torchrun on {store.host} hosts the store. If that machine is lost, the job ends "
            "on all machines, and must be started again from the last checkpoint. If machines may "
            "be preempted, serve the store on a small machine that is not (evenstride launch "
            f"--store-only --store {store}), and add --spot on the others."
        )
    if request.spot and _restarts(request) > RESTARTS:
        notes.append(
            "An error that no restart repairs, such as a typo in the script, occurs again at each "
            f"of the {_restarts(request)} restarts. Start a new script with --restarts {RESTARTS} "
            "or without --spot first."
        )
    if store is not None and not offers.keep_alive:
        notes.append(
            "In this version of torch the keep-alive interval is fixed, so a lost machine is "
            "detected after 15 s instead of 5 s."
        )
    return tuple(notes)
