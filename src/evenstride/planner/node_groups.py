"""The machines of a cluster by type, and what `evenstride launch` runs on each.

All files that start a cluster are made of these parts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from evenstride.errors import ConfigError
from evenstride.planner.search.training_forecast import ClusterChoice, Kind

STORE_PORT = 29400
"""Port of the rendezvous store, which is the default of torchrun and of ``evenstride launch``."""

LONGEST_JOB_NAME = 20
"""Longest name of a job. With a group and two indices, a pod's name has at most 63 characters."""

STORE = "store"
"""Name of the group of a store on a machine of its own; no type of machine gets it."""

_LONGEST_GROUP = 30
_RESTARTS = 1000  # as --spot sets, which leaves the store to a machine of its own
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """The machines of one type."""

    kind: Kind
    count: int  # machines, at least 1
    first: int  # node rank of its first machine
    name: str  # a DNS label, unique in the cluster


def node_groups(choice: ClusterChoice) -> list[NodeGroup]:
    """Return the groups of a cluster in the order of their node ranks.

    Raises:
        ConfigError: a type has no machine, or a name that would break a line of a file.
    """
    groups, first, taken = list[NodeGroup](), 0, {STORE}
    for number, (kind, count) in enumerate(zip(choice.kinds, choice.counts, strict=True), 1):
        if count < 1:
            raise ConfigError(
                f"the plan has {count} machines of type {kind.name}, but a file starts at least "
                "one of each type; leave the type out"
            )
        if not kind.name.isprintable():  # files name the type in comments
            raise ConfigError(
                f"machine type {kind.name!r} has a line break or another character that cannot be "
                "printed; rename it in the catalogue and in the profile"
            )
        name = re.sub(r"[^a-z0-9]+", "-", kind.name.lower()).strip("-")
        name = name[:_LONGEST_GROUP].strip("-") or f"type-{number}"
        short, suffix = name[: _LONGEST_GROUP - 2].strip("-"), number
        while name in taken:
            name, suffix = f"{short}-{suffix}", suffix + 1
        taken.add(name)
        groups.append(NodeGroup(kind, count, first, name))
        first += count
    return groups


def check_job_name(name: str) -> None:
    """Refuse a job name that a launcher would refuse.

    Raises:
        ConfigError: it is not a DNS label, or too long.
    """
    if not _LABEL.fullmatch(name) or len(name) > LONGEST_JOB_NAME:
        raise ConfigError(
            f"--job-name is {name!r}: Kubernetes needs lower-case letters, digits and -, a letter "
            f"first, and at most {LONGEST_JOB_NAME} characters; give a name such as digits-2"
        )


def launch_words(
    choice: ClusterChoice, group: NodeGroup, store: str, command: Sequence[str]
) -> list[str]:
    """Return the command of a machine: ``evenstride launch`` with a store on another machine.

    The number of workers of a machine may differ between groups. With spot machines, training
    continues on those that are left.
    """
    spot = ["--spot"] if choice.spot else []
    return [*_start(choice, group), "--store", store, *spot, *_script(command)]


def launch_line(
    choice: ClusterChoice,
    group: NodeGroup,
    store: str,
    command: Sequence[str],
    *,
    hosted: bool = False,
) -> str:
    """Return the same command as a line for a shell, which expands ``store``.

    With ``hosted``, the first machine of the job hosts the store.
    """
    restarts = ["--restarts", f"{_RESTARTS}"] if hosted else ["--spot"]
    rest = [*(restarts if choice.spot else []), *_script(command)]
    return f"{shlex.join(_start(choice, group))} --store {store} {shlex.join(rest)}"


def _start(choice: ClusterChoice, group: NodeGroup) -> list[str]:
    elastic = choice.spot and choice.machines > 1
    nodes = f"1:{choice.machines}" if elastic else f"{choice.machines}"
    return ["evenstride", "launch", "--nodes", nodes, "--per-node", f"{group.kind.workers}"]


def _script(command: Sequence[str]) -> list[str]:
    """Return the script and its arguments; a module, ``-m name``, needs a separator."""
    return ["--", *command] if command[0].startswith("-") else [*command]
