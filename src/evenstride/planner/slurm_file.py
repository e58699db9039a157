"""How to start a plan with Slurm: a batch script, heterogeneous with several types of machines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from evenstride.errors import ConfigError
from evenstride.planner.node_groups import STORE_PORT, NodeGroup, launch_line, node_groups
from evenstride.planner.search.training_forecast import ClusterChoice

_SIGNAL, _AHEAD_S = "USR1", 60
_SHUTDOWN_S = 30  # torchrun kills the workers this long after it has passed a signal on
_FEATURE = re.compile(r"[\w.-]+", re.ASCII)
# Slurm signals only the script, which asks the workers to save and puts the job back into the
# queue. `wait` returns at a signal.
_TAIL = f"""\
again=
trap 'again=1; scancel --signal={_SIGNAL} "$SLURM_JOB_ID"' {_SIGNAL}
{{srun}} &
step=$!
wait $step; status=$?
if [ "$again" ]; then
  wait $step
  scontrol requeue "$SLURM_JOB_ID" && sleep 300  # until Slurm ends this script
fi
exit $status
"""


def slurm_file(
    choice: ClusterChoice,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    name: str = "evenstride",
) -> str:
    """Return a batch script for ``sbatch``.

    Each type of machine is a component of the job, found by a node feature with the type's name.
    The first machine hosts the store and runs the batch script. Before the time limit, the workers
    save, and Slurm queues the job again. With spot machines, the others continue if one is lost.

    Raises:
        ConfigError: a type's name cannot be a feature.
    Source:
        The manual pages of ``sbatch``, ``srun``, ``scancel`` and ``scontrol``, and "Heterogeneous
        Job Support" in Slurm's documentation.
    """
    groups = node_groups(choice)
    head = "--het-group=0 " if len(groups) > 1 else ""
    parts = [_component(group, stays=choice.spot) for group in groups]
    variables = {"EVENSTRIDE_NOTICES": f"auto,SIG{_SIGNAL}@{_SHUTDOWN_S}", **(env or {})}
    lines = [
        "#!/bin/bash",
        f"# {choice.name}. Each node has its type as a feature (Feature= in slurm.conf).",
        f"#SBATCH --job-name={name} --requeue --open-mode=append --signal=B:{_SIGNAL}@{_AHEAD_S}",
        "\n#SBATCH hetjob\n".join(parts),
        *(f"export {key}={shlex.quote(value)}" for key, value in variables.items()),
        "# The address of the first machine, as Slurm itself reaches it.",
        f"head=$(srun {head}--nodes=1 --ntasks=1 printenv SLURM_LAUNCH_NODE_IPADDR)",
        _TAIL.replace("{srun}", _steps(choice, groups, command)),
    ]
    return "\n".join(lines)


def _component(group: NodeGroup, *, stays: bool) -> str:
    kind = group.kind
    if not _FEATURE.fullmatch(kind.type):
        raise ConfigError(
            f"machine type {kind.type!r} cannot be a feature of Slurm's nodes: expected letters, "
            "digits, ., _ and -; rename it in the catalogue and in the profile"
        )
    gpus = f" --gpus-per-node={kind.workers}" if kind.accelerators else ""
    return (
        f"#SBATCH --nodes={group.count} --ntasks-per-node=1 --exclusive "
        f"--constraint={kind.type}{gpus}{' --no-kill' if stays else ''}"
    )


def _steps(choice: ClusterChoice, groups: Sequence[NodeGroup], command: Sequence[str]) -> str:
    """Return the ``srun`` command; if one of its tasks ends, the others continue."""
    store = f'"$head:{STORE_PORT}" --id "$SLURM_JOB_ID"'
    parts = []
    for number, group in enumerate(groups):
        own = f"--het-group={number} " if len(groups) > 1 else ""
        parts.append(f"{own}{launch_line(choice, group, store, command, hosted=True)}")
    stays = "--no-kill " if choice.spot else ""
    return f"srun --kill-on-bad-exit=0 --wait=0 {stays}" + " \\\n  : ".join(parts)
