"""``evenstride doctor``: what this machine and process group can do, as a block to post."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

from evenstride.cli.render.terminal_text import say
from evenstride.errors import ConfigError

if TYPE_CHECKING:
    from evenstride.runtime.environment import Environment

WRONG = 1
"""Exit code of a bench that found something that is not as promised."""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    bench: Annotated[
        bool, typer.Option("--bench", help="Measure exactness, timing, balance and overhead.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, max=3600, help="With --bench: about how long to measure (90)."),
    ] = None,
) -> None:
    """Tell what this machine can do; under torchrun also what the process group can.

    It lists the ports on which training jobs listen here, and says which of them
    other machines can reach. Under torchrun these are the ports of its own group.

    In a group it checks that weighted gradients are exact, measures how fast the ranks
    exchange and how fast each computes, and names who is slow. With --bench it measures, in
    about two minutes, what evenstride brings and costs here, as a block to post; the exit code
    is 1 if a gradient is not exact.

    Examples:
        evenstride doctor

        torchrun --nproc-per-node 2 -m evenstride doctor

        torchrun --nproc-per-node 2 -m evenstride doctor --bench
    """
    from evenstride.lab.doctor.checkup import examine_group, examine_machine, examine_ports, tell
    from evenstride.runtime.environment import read_environment

    environment = read_environment(os.environ)
    world_size = environment.world_size
    if bench:
        _bench(environment, 90.0 if seconds is None else seconds, as_json)
        return
    if seconds is not None:
        raise ConfigError(
            f"doctor --seconds {seconds:g} says how long --bench measures; add --bench, or leave "
            "it out"
        )
    findings = examine_machine()
    if world_size > 1:
        group = examine_group()
        if group is None:  # another rank prints
            return
        findings["group"] = group
    else:
        findings["ports"] = examine_ports()
    typer.echo(json.dumps(findings) if as_json else tell(findings))


def _bench(environment: Environment, seconds: float, as_json: bool) -> None:
    from evenstride.lab.doctor.bench.bench_ranks import BenchBudget
    from evenstride.lab.doctor.bench.bench_run import run_bench
    from evenstride.lab.doctor.bench.bench_text import tell_bench
    from evenstride.lab.doctor.checkup import examine_machine

    _refuse_what_interferes(environment)
    findings = examine_machine()
    rank, findings["bench"] = run_bench(
        environment.world_size, BenchBudget.of(seconds), lambda text: say(text, err=True)
    )
    wrong = findings["bench"]["wrong"]
    if rank == 0:
        typer.echo(json.dumps(findings) if as_json else tell_bench(findings))
        for reason in wrong:
            say(f"wrong: {reason}", err=True)
    if wrong:
        raise typer.Exit(WRONG)


def _refuse_what_interferes(environment: Environment) -> None:
    """Refuse the variables that would end, change or record the bench's own runs."""
    names = {
        "EVENSTRIDE_MAX_STEPS": environment.max_steps,
        "EVENSTRIDE_CALIBRATE": environment.calibrate,
        "EVENSTRIDE_TRACE": environment.trace,
        "_EVENSTRIDE_PROGRESS": environment.progress,
    }
    found = [name for name, value in names.items() if value is not None]
    if found:
        raise ConfigError(
            f"doctor --bench makes runs of its own, which {' and '.join(found)} would change; "
            "unset it for the bench"
        )
