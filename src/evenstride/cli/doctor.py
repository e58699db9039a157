"""``evenstride doctor``: what this machine and process group can do, as a block to post."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell what this machine can do; under torchrun also what the process group can.

    In a group it checks that weighted gradients are exact, measures how fast the ranks
    exchange and how fast each computes, and names who is slow.

    Examples:
        evenstride doctor

        torchrun --nproc-per-node 2 -m evenstride doctor
    """
    from evenstride.lab.checkup import examine_group, examine_machine, tell
    from evenstride.runtime.environment import read_environment

    world_size = read_environment(os.environ).world_size
    findings = examine_machine()
    if world_size > 1:
        group = examine_group()
        if group is None:  # another rank prints
            return
        findings["group"] = group
    typer.echo(json.dumps(findings) if as_json else tell(findings))
