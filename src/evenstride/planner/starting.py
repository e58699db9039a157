"""How to start training on a cluster: SkyPilot's files, one for each kind, or torchrun."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from evenstride.planner.outlook import Choice

_PORT = 29500


class _Blocks(yaml.SafeDumper):  # type: ignore[misc]
    """Writes lines as lines."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if text.endswith("\n") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Blocks.add_representer(str, _text)


def torchrun_lines(choice: Choice, command: Sequence[str]) -> list[str]:
    """Return the lines to start on the machines by hand, one for each kind.

    Args:
        choice: the cluster.
        command: script and arguments.
    """
    lines, first = [], 0
    for kind, count in zip(choice.kinds, choice.counts, strict=True):
        ranks = f"{first}" if count == 1 else f"{first}..{first + count - 1}"
        lines.append(
            f"torchrun --nnodes={choice.machines} --node-rank={ranks} "
            f"--nproc-per-node={kind.workers} --master-addr=HOST --master-port={_PORT} "
            f"{shlex.join(command)}"
        )
        first += count
    return lines


def skypilot_files(
    choice: Choice, command: Sequence[str], *, name: str = "evenstride"
) -> dict[str, str]:
    """Return SkyPilot's task files by their names.

    A task has machines of one kind, so a mix is a task for each: the first serves the meeting, and
    the others are given its address as ``EVENSTRIDE_HEAD``. They must be able to reach each other.

    Args:
        choice: the cluster.
        command: script and arguments, run in the folder that is sent along.
        name: of the tasks.

    Source:
        SkyPilot's documentation, "SkyPilot YAML" (fields) and "Distributed Jobs on Many Nodes"
        (variables).
    """
    files, first = dict[str, str](), 0
    for number, (kind, count) in enumerate(zip(choice.kinds, choice.counts, strict=True)):
        own = name if len(choice.kinds) == 1 else f"{name}-{number + 1}"
        task = {
            "name": own,
            "workdir": ".",
            "num_nodes": count,
            "resources": {
                "infra": kind.place or None,
                "instance_type": kind.type,
                "use_spot": kind.spot,
            },
            "envs": {"EVENSTRIDE_HEAD": ""} if number else {},
            "setup": "pip install torch evenstride\n",
            "run": _run(choice, kind.workers, first, command),
        }
        files[f"{own}.yaml"] = yaml.dump(
            _without_empty(task), Dumper=_Blocks, sort_keys=False, width=200
        )
        first += count
    return files


def _run(choice: Choice, workers: int, first: int, command: Sequence[str]) -> str:
    head = '$(echo "$SKYPILOT_NODE_IPS" | head -n1)' if not first else "$EVENSTRIDE_HEAD"
    rank = "$SKYPILOT_NODE_RANK" if not first else f"$((SKYPILOT_NODE_RANK + {first}))"
    return (
        f"torchrun --nnodes={choice.machines} --nproc-per-node={workers} --node-rank={rank} "
        f"--master-addr={head} --master-port={_PORT} {shlex.join(command)}\n"
    )


def _without_empty(task: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in task.items() if value not in ({}, None)}
    kept["resources"] = {k: v for k, v in kept["resources"].items() if v is not None}
    return kept
