"""Several hosts on one machine, as network and process namespaces with their own addresses.

Each host has its own network (one link to a bridge, at a given rate), host name and process ids, so
that programs see separate machines. Killing a host ends all of its processes at once, as when a
machine is preempted. The hosts share the disk. This requires Linux and root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from evenstride.errors import LimitError

_NUMBERS = count()
_KILL_S = 10.0
INTERFACE = "ev0"
"""Name of every host's link."""


def cannot_have_hosts() -> str:
    """Return why hosts cannot be made here, or an empty text if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (iproute2 and util-linux)"
    probe = f"evprobe{os.getpid()}"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "netns", "del", probe)
    except LimitError as error:
        return str(error)
    return ""


@dataclass(slots=True)
class Host:
    """One host. `start` runs programs on it.

    Args:
        name: Host name.
        address: IPv4 address.
        space: Name of the network namespace.
        names: File with the addresses of all hosts, mounted as ``/etc/hosts``.
        running: Started programs that have not been waited for.
    """

    name: str
    address: str
    space: str
    names: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a program and append its output to a file. It ends with this process."""
        inside = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
        # The first process of a process namespace ignores signals without a handler. So the first
        # process is a shell that forwards them and exits with the code of the program.
        script = (
            f'hostname {self.name}; mount --bind {self.names} /etc/hosts; "$@" & child=$!; '
            "trap 'kill -TERM $child 2>/dev/null' TERM; "
            "while :; do wait $child; code=$?; kill -0 $child 2>/dev/null || exit $code; done"
        )
        with log.open("ab") as out:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.space, *inside, "bash", "-c", script, "-", *command],
                env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, **environment},
                stdout=out,
                stderr=out,
            )
        self.running.append(process)
        return process

    def terminate(self) -> None:
        """Send SIGTERM to every program on the host, as when a machine shuts down."""
        for process in self.running:
            for inner in _first_inside(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(inner, signal.SIGTERM)

    def kill(self) -> None:
        """Kill all processes of the host at once, and wait until they have ended."""
        for process in self.running:
            for inner in _first_inside(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(inner, signal.SIGKILL)  # the kernel ends the whole namespace with it
            process.kill()
            process.wait(_KILL_S)
        self.running.clear()


def _first_inside(pid: int) -> list[int]:
    """Return the first processes in the namespace of a started program, by their outer pids."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        return [int(child) for child in children.read_text().split()]
    except (OSError, ValueError):
        return []


@contextlib.contextmanager
def hosts(
    number: int, *, rate_mbit: float | None = None
) -> Iterator[tuple[Host, tuple[Host, ...]]]:
    """Create hosts that reach each other, and remove them at the end in any case.

    Args:
        number: Number of hosts.
        rate_mbit: Rate at which each host may send, in Mbit/s; ``None`` for no limit.

    Yields:
        An extra host for a process that must outlive the others, such as a store, and the hosts.

    Raises:
        LimitError: The kernel or the user's rights do not allow it.
    """
    run = f"{os.getpid() % 100_000}n{next(_NUMBERS)}"
    bridge, subnet = f"evb{run}"[:15], f"10.{64 + os.getpid() % 64}.{next(_NUMBERS) % 250}"
    file, path = tempfile.mkstemp(prefix="hosts-")
    os.close(file)
    names = Path(path)
    made = [
        Host(f"host{k}", f"{subnet}.{10 + k}", f"evh{run}-{k}", names) for k in range(number + 1)
    ]
    known = [("127.0.0.1", "localhost"), *((host.address, host.name) for host in made)]
    names.write_text("".join(f"{address} {name}\n" for address, name in known))
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for k, host in enumerate(made):
            _plug_in(host, bridge, f"ev{run}v{k}"[:15], rate_mbit)
        yield made[0], tuple(made[1:])
    finally:
        for host in made:
            host.kill()
            _try("ip", "netns", "del", host.space)
        _try("ip", "link", "del", bridge)
        names.unlink()


def _plug_in(host: Host, bridge: str, port: str, rate_mbit: float | None) -> None:
    inside = ("ip", "netns", "exec", host.space)
    _run("ip", "netns", "add", host.space)
    _run("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", host.space)
    _run("ip", "link", "set", port, "master", bridge)
    _run("ip", "link", "set", port, "up")
    _run(*inside, "ip", "addr", "add", f"{host.address}/24", "dev", INTERFACE)
    _run(*inside, "ip", "link", "set", INTERFACE, "up")
    _run(*inside, "ip", "link", "set", "lo", "up")
    if rate_mbit is not None:
        limit = ("rate", f"{rate_mbit}mbit", "burst", "64kb", "latency", "50ms")
        _run(*inside, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LimitError(
            f"{' '.join(command)} failed ({done.stderr.strip() or done.returncode}); several hosts "
            "on one machine need Linux, root and network namespaces"
        )


def _try(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=False)
