"""The torchrun command for workers that come and go, and why each of its settings is what it is.

Only builds the command; nothing here starts a process or imports torch. Which settings arrive
was read in ``torch/distributed/elastic/rendezvous`` of torch 2.6 and 2.13, and what they do was
measured: ``docs/how-to/elastic.md``.
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
"""Port of a store that is named without one; torchrun's own default."""

SPOT_RESTARTS, RESTARTS = 1000, 3

_RENDEZVOUS_S = {
    # How long the others wait for more nodes once there are enough; 30 by default, and paid at
    # every restart in which fewer than the most come.
    "last_call_timeout": 3,
    # A node that has been silent for 5 times 1 s is taken for dead, instead of 3 times 5 s.
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 5,
    # One request to the store.
    "read_timeout": 60,
}
_JOIN_S, _SPOT_JOIN_S = 600, 3600
# Long enough for a checkpoint, and short enough for the 30 s after which most machines that may
# be taken away are gone.
_SPOT_SHUTDOWN_S = 20

_HOST = re.compile(r"\[(?P<bracketed>[0-9A-Fa-f:.%]+)\]|(?P<plain>[\w.-]+)")
_NODES = re.compile(r"([0-9]+)(?::([0-9]+))?")
_EVERYWHERE = ipaddress.IPv4Address(0)


@dataclass(frozen=True, slots=True)
class Offers:
    """What the torchrun that is installed knows, beyond what all supported ones do."""

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
    """What is asked for."""

    command: tuple[str, ...]  # script and arguments
    nodes: tuple[int, int] = (1, 1)  # fewest and most machines
    # Workers per machine, or what torchrun is to count: ``auto``, ``gpu``, ``cpu``.
    per_node: str = "auto"
    store: StoreEndpoint | None = None  # where all machines meet
    name: str = "evenstride"  # of the job, the same on all machines
    spot: bool = False  # whether machines may be taken away
    restarts: int | None = None  # most of them; ``None`` for what suits
    # Of this machine, for the others; ``None`` for the one towards the store.
    address: str | None = None


@dataclass(frozen=True, slots=True)
class Torchrun:
    """A command."""

    arguments: tuple[str, ...]  # of ``python -m evenstride.lab.processes.rendezvous``
    notes: tuple[str, ...]  # whole sentences that the user should know


def parse_nodes(text: str) -> tuple[int, int]:
    """Return the fewest and the most nodes of ``4`` or ``1:4``."""
    found = _NODES.fullmatch(text.strip())
    fewest, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= fewest <= most:
        raise ConfigError(
            f"--nodes {text!r} is not understood; give a number of machines, such as 4, or the "
            "fewest and the most, such as 1:4"
        )
    return fewest, most


def parse_per_node(text: str) -> str:
    """Return the number of workers per machine, as torchrun reads it."""
    if text in ("auto", "gpu", "cpu") or (text.isascii() and text.isdecimal() and int(text) > 0):
        return text
    raise ConfigError(
        f"--per-node {text!r} is not understood; give the workers per machine, such as 2, or one "
        "of auto, gpu, cpu"
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
        f"--store {text!r} is not understood; give a host name or address, and a port if it is "
        f"not {DEFAULT_PORT}: head, head:29500, [fd00::1]:29500"
    )


def _refuse_if_everywhere(host: str) -> None:
    """Refuse 0.0.0.0 and its kin; no name is looked up."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        try:
            address = ipaddress.ip_address(socket.inet_aton(host))  # "0" is 0.0.0.0, too
        except OSError:
            return
    if address.is_unspecified or getattr(address, "ipv4_mapped", None) == _EVERYWHERE:
        raise ConfigError(
            f"--store {host} means every address of a machine: workers cannot meet there, and a "
            "store would be open to whoever reaches this machine; name the one address that all "
            "machines reach"
        )


def offers_of_torch() -> Offers:
    """Return what the installed torchrun knows, as its source tells; torch is not imported."""
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

    Without ``offers``, the torchrun that will run it knows everything.
    """
    offers = offers or Offers()
    alone = request.nodes[1] == 1
    if not alone and request.store is None:
        raise ConfigError(
            f"up to {request.nodes[1]} machines cannot find each other without a store; serve one "
            "on a machine that stays (evenstride launch --store-only --store HOST:PORT) and add "
            "--store HOST:PORT --spot on every machine; or, where none is taken away, add --store "
            "with the name of the first machine"
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
    """Return the arguments by which machines find each other."""
    fewest, most = request.nodes
    settings: Mapping[str, int] = {
        **({"is_host": 0} if request.spot else {}),
        "join_timeout": _SPOT_JOIN_S if request.spot else _JOIN_S,
        **_RENDEZVOUS_S,
    }
    told = [f"{k}={v}" for k, v in settings.items() if offers.keep_alive or "keep_alive" not in k]
    return [
        f"--nnodes={fewest}:{most}",
        f"--rdzv-endpoint={store}",
        f"--rdzv-id={request.name}",
        f"--rdzv-conf={','.join(told)}",
    ]


def _notes(request: Request, offers: Offers) -> tuple[str, ...]:
    notes = []
    store = request.store
    if store is None and request.address is not None:
        notes.append(
            f"--address {request.address} is not used: on one machine everything listens on "
            "loopback."
        )
    if store is None and request.spot:
        notes.append(
            "There is one machine, and the job ends with it; start it again to go on from the "
            "last checkpoint, or give --nodes 1:2 and a --store elsewhere, so that another one "
            "can take over."
        )
    elif store is not None and request.spot:
        notes.append(
            f"The store must be served at {store}, on a machine that is not taken away: "
            f"evenstride launch --store-only --store {store}"
        )
    elif store is not None:
        notes.append(
            f"The machine {store.host} hosts the store inside its torchrun. If that machine is "
            "lost, torchrun cannot go on, and neither can the other machines: all must be started "
            "again from the last checkpoint. Where machines may be taken away, serve the store on "
            f"a small one that stays (evenstride launch --store-only --store {store}) and add "
            "--spot on the others."
        )
    if request.spot and _restarts(request) > RESTARTS:
        notes.append(
            "What no restart mends, such as a typo in the script or a checkpoint of another run, "
            f"is met again at each of {_restarts(request)} restarts; try a script's first start "
            f"with --restarts {RESTARTS}, or without --spot."
        )
    if store is not None and not offers.keep_alive:
        notes.append(
            "This torch does not let the keep-alive be set: a machine that vanishes is noticed "
            "after 15 s rather than 5."
        )
    return tuple(notes)
