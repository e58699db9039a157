"""How to start training on a cluster: SkyPilot's files, one for each kind, or lines to run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from evenstride.planner.search.training_forecast import ClusterChoice, TrainingForecast

_PORT = 29500
_USUAL_SYNC = "bsp"
_A_PART = 1e-6  # of an epoch, by which rounding may be off


class _Blocks(yaml.SafeDumper):  # type: ignore[misc]
    """Writes lines as lines."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if text.endswith("\n") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Blocks.add_representer(str, _text)


def variables(one: TrainingForecast, sync: str = _USUAL_SYNC) -> dict[str, str]:
    """Return what a script is told of a plan, as variables of its environment.

    ``EVENSTRIDE_EPOCHS`` is for a script to read, in whole epochs. ``EVENSTRIDE_GLOBAL_BATCH``
    counts where it leaves its batch open, ``EVENSTRIDE_SYNC`` where it leaves that.
    """
    told = {
        "EVENSTRIDE_EPOCHS": str(math.ceil(one.epochs.value - _A_PART)),
        "EVENSTRIDE_GLOBAL_BATCH": str(one.choice.batch),
    }
    return told if sync == _USUAL_SYNC else {**told, "EVENSTRIDE_SYNC": sync}


def start_lines(
    choice: ClusterChoice, command: Sequence[str], told: Mapping[str, str] | None = None
) -> list[str]:
    """Return the lines to start on the machines by hand, with comments on where each belongs.

    On one machine they run as they are. On several, what nobody can know before is taken from the
    shell's ``HEAD`` and ``NODE_RANK``; without these they say what is missing. Where machines may
    be taken away, `evenstride launch` goes on without them.
    """
    named = "".join(f"{name}={shlex.quote(value)} " for name, value in (told or {}).items())
    if choice.spot:
        return _launch_lines(choice, named, shlex.join(command))
    if choice.machines == 1:
        workers = choice.kinds[0].workers
        return [f"{named}torchrun --standalone --nproc-per-node={workers} {shlex.join(command)}"]
    return list(_torchrun_lines(choice, named, shlex.join(command)))


def _torchrun_lines(choice: ClusterChoice, named: str, script: str) -> Iterator[str]:
    head, first = "${HEAD:?is the address of the machine with NODE_RANK 0}", 0
    for kind, count in zip(choice.kinds, choice.counts, strict=True):
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
        first += count


def _launch_lines(choice: ClusterChoice, named: str, script: str) -> list[str]:
    """Return the lines for machines that may be taken away: a store that stays, and who comes."""
    store = '"${STORE:?is the address of the machine that stays}"'
    nodes = f"1:{choice.machines}" if choice.machines > 1 else "1"
    lines = [
        "# on a small machine that stays and that the others reach, after export STORE=(its "
        "address):",
        f"evenstride launch --store-only --store {store}",
    ]
    for kind, count in zip(choice.kinds, choice.counts, strict=True):
        where = f"each of {count} x {kind.name}" if count > 1 else f"{count} x {kind.name}"
        lines += [
            f"# on {where}, and on each that takes the place of a lost one, after the same export:",
            f"{named}evenstride launch --nodes {nodes} --per-node {kind.workers} --store {store} "
            f"--spot {script}",
        ]
    return lines


def skypilot_files(
    choice: ClusterChoice,
    command: Sequence[str],
    told: Mapping[str, str] | None = None,
    *,
    name: str = "evenstride",
    torch: str = "",
) -> dict[str, str]:
    """Return SkyPilot's task files by their names.

    A task has machines of one kind, so a mix is a task for each: the first serves the meeting, and
    the others are given its address as ``_EVENSTRIDE_HEAD``. They must be able to reach each other.

    Source:
        SkyPilot's documentation, "SkyPilot YAML" (fields) and "Distributed Jobs on Many Nodes"
        (variables).
    """
    files, first = dict[str, str](), 0
    for number, (kind, count) in enumerate(zip(choice.kinds, choice.counts, strict=True)):
        own = name if len(choice.kinds) == 1 else f"{name}-{number + 1}"
        head = {"_EVENSTRIDE_HEAD": ""} if number else {}
        task = {
            "name": own,
            "workdir": ".",
            "num_nodes": count,
            "resources": {
                "infra": kind.place or None,
                "instance_type": kind.type,
                "accelerators": kind.accelerators or None,
                "use_spot": kind.spot,
            },
            "envs": {**(told or {}), **head},
            "setup": _setup(torch),
            "run": _run(choice, kind.workers, first, command),
        }
        files[f"{own}.yaml"] = yaml.dump(
            _without_empty(task), Dumper=_Blocks, sort_keys=False, width=200
        )
        first += count
    return files


def _setup(torch: str) -> str:
    """Return how a machine gets what the script needs.

    Local parts of a version, such as ``+cpu``, are not on the package index.
    """
    version = torch.partition("+")[0]
    return (
        f"pip install torch{f'=={version}' if version else ''}\n"
        "# evenstride is installed from its own folder. Put a copy of that, named evenstride-src,\n"
        "# into the folder that is sent along, or change this line to where yours is.\n"
        "pip install ./evenstride-src\n"
    )


def _run(choice: ClusterChoice, workers: int, first: int, command: Sequence[str]) -> str:
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
