"""``evenstride doctor``: what this machine and process group support, as a block to post."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenstride._importing import import_to_train
from evenstride.cli.terminal_text import say
from evenstride.errors import ConfigError

if TYPE_CHECKING:
    from evenstride.runtime.environment import Environment


WRONG = 1
"""Exit code of a bench that found a gradient that is not exact."""
HOW_TO_GROUP = (
    "Only one process ran. For timing and balance, run torchrun --nproc-per-node N -m evenstride "
    "doctor --bench, where N is the number of GPUs."
)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    bench: Annotated[
        bool, typer.Option("--bench", help="Measure exactness, timing, balance and overhead.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, max=3600, help="With --bench: length in seconds. Default: 90."),
    ] = None,
) -> None:
    """Report what this machine supports; under torchrun also what the process group supports.

    The report lists the ports on which training jobs listen, and which of them other machines can
    reach. Under torchrun these are the ports of its own group.

    In a group, doctor checks that weighted gradients are exact. It measures communication and the
    speed of each rank, and names slow ranks. With --bench it measures the speed-up and the overhead
    of evenstride on this machine, in about two minutes, and prints a block to post. The exit code
    is 1 if a gradient is not exact.

    Examples:
        evenstride doctor

        torchrun --nproc-per-node 2 -m evenstride doctor

        torchrun --nproc-per-node 2 -m evenstride doctor --bench
    """
    from evenstride.lab.doctor.checkup import examine_group, examine_machine, ports_of_jobs, tell
    from evenstride.runtime.environment import read_environment

    environment = read_environment(os.environ)
    world_size = environment.world_size
    if bench:
        _bench(environment, 90.0 if seconds is None else seconds, as_json)
        return
    if seconds is not None:
        raise ConfigError(
            f"--seconds {seconds:g} sets how long --bench measures, and --bench is missing; add "
            "--bench or remove --seconds"
        )
    findings = examine_machine()
    if world_size > 1:
        group = examine_group()
        if group is None:  # rank 0 prints
            return
        findings["group"] = group
    else:
        findings["ports"] = [port.to_plain() for port in ports_of_jobs()]
    typer.echo(json.dumps(findings) if as_json else tell(findings))


def _bench(environment: Environment, seconds: float, as_json: bool) -> None:
    from evenstride.lab.doctor.bench_ranks import BenchBudget
    from evenstride.lab.doctor.checkup import examine_machine

    _refuse_interference(environment)
    findings = examine_machine()
    # Imported by name, because it imports all of training.
    running = import_to_train("evenstride.lab.doctor.bench_run")
    rank, findings["bench"] = running.run_bench(
        environment.world_size, BenchBudget.of(seconds), lambda text: say(text, err=True)
    )
    wrong = findings["bench"]["wrong"]
    if rank == 0:
        typer.echo(json.dumps(findings) if as_json else tell_bench(findings))
        for reason in wrong:
            say(f"wrong: {reason}", err=True)
    if wrong:
        raise typer.Exit(WRONG)


def _refuse_interference(environment: Environment) -> None:
    """Refuse environment variables that would end, change or record the runs of the bench."""
    names = {
        "EVENSTRIDE_MAX_STEPS": environment.max_steps,
        "EVENSTRIDE_CALIBRATE": environment.calibrate,
        "EVENSTRIDE_TRACE": environment.trace,
        "_EVENSTRIDE_PROGRESS": environment.progress,
    }
    found = [name for name, value in names.items() if value is not None]
    if found:
        raise ConfigError(
            f"{' and '.join(found)} would change the runs that doctor --bench makes; unset it for "
            "the bench"
        )


def tell_bench(findings: dict[str, Any]) -> str:
    """Return the findings about machine and bench as a heading and a fixed-width block."""
    bench = findings["bench"]
    ranks = bench["ranks"]
    backend = f" over {bench['backend']}" if bench["backend"] else ""
    names = ", ".join(dict.fromkeys(name for mine in ranks for name in mine["devices"]))
    lines = [
        f"### evenstride {findings['evenstride']} bench: {len(ranks)} rank(s){backend} on {names}",
        "",
        "```",
        f"versions    python {findings['python']}, torch {findings['torch']} "
        f"({findings['wheel']}), numpy {findings['numpy']}, {findings['system']}",
        *(_rank(mine) for mine in ranks),
        *(_exactness(name, one) for name, one in bench["exactness"].items()),
        *(_timing(rank, one) for rank, one in enumerate(bench["timing"] or ())),
        *([_waiting(bench["waiting"])] if bench["waiting"] else ()),
        *(_balance(bench["balance"]) if bench["balance"] else ()),
        *_overhead(bench["overhead"], bench["global_batch"]),
        f"wrong       {'; '.join(bench['wrong']) or 'nothing'}",
        "```",
    ]
    return "\n".join(lines + ([] if len(ranks) > 1 else [HOW_TO_GROUP]))


def _rank(mine: dict[str, Any]) -> str:
    architecture = f" ({', '.join(mine['capability'])})" if mine["capability"] else ""
    memory = ", ".join(f"{size / 2**30:.1f} GiB" for size in mine["memory_bytes"])
    return (
        f"rank {mine['rank']:<6} {', '.join(mine['devices'])}{architecture}, {memory}, "
        f"bf16 {', '.join(mine['bf16'])}, compile {', '.join(mine['compile'])}; "
        f"{mine['worker']}, {mine['architecture']}, torch {mine['torch']}"
    )


def _exactness(name: str, one: dict[str, Any]) -> str:
    verdict = "exact" if one["error"] <= one["limit"] else "NOT EXACT"
    return (
        f"exactness   {name} off by {one['error']:.1e}: {verdict} (limit {one['limit']:.0e}; "
        f"{one['control']:.1e} without weights)"
    )


def _timing(rank: int, one: dict[str, Any]) -> str:
    if one["read_s"] is None:
        read = "no step was reported in time"
    else:
        read = f"evenstride measured {_ms(one['read_s'])} (median ratio {one['ratio']:.3f})"
    return (
        f"timing      rank {rank}, share {one['share']}: busy time {_ms(one['true_s'])}, {read}; "
        f"step time {_ms(one['step_s'])}"
    )


def _waiting(one: dict[str, Any]) -> str:
    about = f"waiting     rank 0, share {one['share']}: "
    if one["waiting_s"] is None:
        return f"{about}no step was reported in time"
    low, high = one["ratio_interval"]
    return (
        f"{about}busy time {_ms(one['balance_s'])} in balance, {_ms(one['waiting_s'])} while it "
        f"waits for the others; ratio {one['ratio']:.3f} (median of pairs, 95 % {low:.3f} to "
        f"{high:.3f})"
    )


def _balance(one: dict[str, Any]) -> list[str]:
    low, high = one["speedup_interval"]
    unclear = "; unresolved: both may be equally fast" if low <= 1.0 <= high else ""
    bound = f"{one['bound_model']:.3f}" if one["bound_model"] else "unknown"
    shares = "/".join(map(str, one["shares"]))
    return [
        f"balance     step time: equal {_ms(one['equal_s'])}, adaptive {_ms(one['adaptive_s'])}; "
        f"speed-up {one['speedup']:.3f} (median of pairs, 95 % {low:.3f} to {high:.3f}; bound "
        f"{bound}, from fitted curves){unclear}",
        f"            shares {shares}, {one['changes']} change(s), {one['blocks']} pairs of blocks",
    ]


def _overhead(one: dict[str, Any], batch: int) -> list[str]:
    low, high = one["ratio_interval"]
    least, most = one["control_interval"]
    return [
        f"overhead    step time of {batch} samples: plain {_ms(one['plain_s'])}, evenstride "
        f"{_ms(one['evenstride_s'])}; ratio {one['ratio']:.4f} (median of pairs, 95 % {low:.4f} to "
        f"{high:.4f})",
        f"            plain / plain {one['control']:.4f} (95 % {least:.4f} to {most:.4f}), "
        f"{one['pairs']} pairs; under 1 %: {one['verdict']}; own time {_ms(one['own_s'])} per step",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
