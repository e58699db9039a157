"""How to start training on a cluster: SkyPilot files, one for each kind, or command lines."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from evenstride.planner.node_groups import NodeGroup, launch_line, node_groups
from evenstride.planner.search.training_forecast import ClusterChoice, TrainingForecast

_PORT = 29500
_USUAL_SYNC = "bsp"
_SKY_RESTARTS = 10
_A_PART = 1e-6  # tolerance for rounding, as a fraction of an epoch


class Blocks(yaml.SafeDumper):  # type: ignore[misc]
    """Writes multi-line texts as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if text.endswith("\n") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Blocks.add_representer(str, _text)


def as_yaml(*documents: dict[str, Any]) -> str:
    """Return documents as YAML, their fields in the given order."""
    return str(yaml.dump_all(documents, Dumper=Blocks, sort_keys=False, width=200))


def variables(one: TrainingForecast, sync: str = _USUAL_SYNC) -> dict[str, str]:
    """Return the environment variables that pass a plan to a script.

    The script reads ``EVENSTRIDE_EPOCHS``, in whole epochs. ``EVENSTRIDE_GLOBAL_BATCH``
    applies if the script leaves its batch open, ``EVENSTRIDE_SYNC`` if it leaves that open.
    """
    found = {
        "EVENSTRIDE_EPOCHS": str(math.ceil(one.epochs.value - _A_PART)),
        "EVENSTRIDE_GLOBAL_BATCH": str(one.choice.batch),
    }
    return found if sync == _USUAL_SYNC else {**found, "EVENSTRIDE_SYNC": sync}


def start_lines(
    choice: ClusterChoice, command: Sequence[str], env: Mapping[str, str] | None = None
) -> list[str]:
    """Return the lines that start training by hand, with comments on the machine of each.

    On one machine they run as they are. On several, values that are not known in advance come from
    the shell's ``HEAD`` and ``NODE_RANK``; without these the shell reports what is missing. For
    spot machines, `evenstride launch` continues without preempted ones.
    """
    named = "".join(f"{name}={shlex.quote(value)} " for name, value in (env or {}).items())
    if choice.spot:
        return _launch_lines(choice, named, command)
    if choice.machines == 1:
        workers = choice.kinds[0].workers
        return [f"{named}torchrun --standalone --nproc-per-node={workers} {shlex.join(command)}"]
    return list(_torchrun_lines(choice, named, shlex.join(command)))


def _torchrun_lines(choice: ClusterChoice, named: str, script: str) -> Iterator[str]:
    head = "${HEAD:?is the address of the machine with NODE_RANK 0}"
    for group in node_groups(choice):
        kind, count, first = group.kind, group.count, group.first
        last = first + count - 1
        if count > 1:
            where, ranks = f"each of {count} x {kind.name}", f"{first} ... {last}"
            rank = f"${{NODE_RANK:?is {first} to {last}, another one on each machine}}"
        else:
            where, ranks = f"{count} x {kind.name}", f"{first}"
            rank = f"${{NODE_RANK:?is {first} on this machine}}"
        yield (
            f"# on {where}, after export NODE_RANK={ranks} and HEAD=(address of the machine with "
            "rank 0):"
        )
        yield (
            f'{named}torchrun --nnodes={choice.machines} --node-rank="{rank}" --nproc-per-node='
            f'{kind.workers} --master-addr="{head}" --master-port={_PORT} {script}'
        )


def _launch_lines(choice: ClusterChoice, named: str, command: Sequence[str]) -> list[str]:
    """Return the lines for spot machines: a store that stays, and the machines that come and go."""
    store = '"${STORE:?is the address of the machine that stays}"'
    lines = [
        "# on a small on-demand machine that the others can reach, after export STORE=(its "
        "address):",
        f"evenstride launch --store-only --store {store}",
    ]
    for group in node_groups(choice):
        kind, count = group.kind, group.count
        where = f"each of {count} x {kind.name}" if count > 1 else f"{count} x {kind.name}"
        lines += [
            f"# on {where}, and on each replacement of a preempted one, after the same export:",
            f"{named}{launch_line(choice, group, store, command)}",
        ]
    return lines


def skypilot_files(
    choice: ClusterChoice,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    name: str = "evenstride",
    torch: str = "",
) -> dict[str, str]:
    """Return SkyPilot's task files by their names.

    A task has machines of one kind, so a mix has a task for each. The first task hosts the
    rendezvous; the others get its address as ``_EVENSTRIDE_HEAD``. They must reach each other.
    Source:
        SkyPilot's documentation, "SkyPilot YAML" (fields) and "Distributed Jobs on Many Nodes"
        (variables).
    """
    files = dict[str, str]()
    for number, group in enumerate(node_groups(choice)):
        kind = group.kind
        own = name if len(choice.kinds) == 1 else f"{name}-{number + 1}"
        head = {"_EVENSTRIDE_HEAD": ""} if number else {}
        task = {
            "name": own,
            "workdir": ".",
            "num_nodes": group.count,
            "resources": {
                "infra": kind.place or None,
                "instance_type": kind.type,
                "accelerators": kind.accelerators or None,
                "use_spot": kind.spot,
                "job_recovery": _recovery(choice),
            },
            "envs": {**(env or {}), **head},
            "setup": _setup(torch),
            "run": _run(choice, group, command),
        }
        files[f"{own}.yaml"] = as_yaml(_without_empty(task))
    return files


def _recovery(choice: ClusterChoice) -> dict[str, int] | None:
    """Return what a managed job does, which starts all machines again when one is preempted.

    Workers leave at a notice, before SkyPilot sees that the machine is gone. That looks like an
    error of the script.
    """
    alone = len(choice.kinds) == 1
    return {"max_restarts_on_errors": _SKY_RESTARTS} if choice.spot and alone else None


def _setup(torch: str) -> str:
    """Return the commands that install what the script needs.

    Local parts of a version, such as ``+cpu``, are not on the package index.
    """
    version = torch.partition("+")[0]
    return (
        f"pip install torch{f'=={version}' if version else ''}\n"
        "# evenstride is installed from its source folder. Put a copy, named evenstride-src,\n"
        "# into the workdir that is uploaded, or change this line to its location.\n"
        "pip install ./evenstride-src\n"
    )


def _run(choice: ClusterChoice, group: NodeGroup, command: Sequence[str]) -> str:
    first, workers = group.first, group.kind.workers
    head = '$(echo "$SKYPILOT_NODE_IPS" | head -n1)' if not first else "$_EVENSTRIDE_HEAD"
    rank = "$SKYPILOT_NODE_RANK" if not first else f"$((SKYPILOT_NODE_RANK + {first}))"
    return (
        f"torchrun --nnodes={choice.machines} --nproc-per-node={workers} --node-rank={rank} "
        f"--master-addr={head} --master-port={_PORT} {shlex.join(command)}\n"
    )


def _without_empty(task: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in task.items() if value not in ({}, None)}
    kept["resources"] = {k: v for k, v in kept["resources"].items() if v is not None}
    return kept
