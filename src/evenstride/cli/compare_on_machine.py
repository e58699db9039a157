"""The other half of ``evenstride compare``: policies on real processes of chosen speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenstride.cli.render.terminal_text import say
from evenstride.errors import ConfigError

if TYPE_CHECKING:
    from evenstride.lab.comparison.comparison_result import Comparison
    from evenstride.lab.comparison.lab_session import LabPlan
    from evenstride.report.suite_figures import Panel

_OURS, _EQUAL = "adaptive", "uniform"
_STEPS = 120


def real_plan(
    command: Sequence[str] | None,
    policies: Sequence[str] | None,
    speeds: str,
    changes: Sequence[str],
    *,
    repeats: int,
    steps: int | None,
) -> LabPlan:
    """Return the lab session for what the command line says; ``None`` where it says nothing.

    Raises:
        ConfigError: something is not understood.
    """
    from evenstride.cli.arguments import every_policy, split_policies
    from evenstride.core.policies import policy_from_spec
    from evenstride.lab.comparison.lab_session import LabPlan
    from evenstride.lab.limits.speeds import parse_change, parse_speeds

    _refuse_scenario(command)
    wanted = parse_speeds(speeds)
    names = split_policies(policies) if policies else every_policy()
    for name in names:
        policy_from_spec(name)
    # The lab counts the speed-up for the last one, and begins with the first.
    names = tuple(sorted(names, key=lambda name: (name != _EQUAL, name == _OURS)))
    folder = Path("runs") / time.strftime("compare-%Y%m%d-%H%M%S")
    return LabPlan(
        command=tuple(command or [own_script()]),
        speeds=wanted,
        policies=names,
        steps=steps or _STEPS,
        repeats=repeats,
        changes=tuple(parse_change(text, len(wanted)) for text in changes),
        folder=folder.resolve(),
        calibrate=True,
    )


def _refuse_scenario(command: Sequence[str] | None) -> None:
    if command and Path(command[0]).suffix.lower() in (".yaml", ".yml"):
        raise ConfigError(
            f"--real runs a script, and {command[0]} is none; leave --real out to simulate it, or "
            "give a script, or nothing for the package's own"
        )


def own_script() -> str:
    """Return the path of the script that is run if none is given, without importing it."""
    spec = find_spec("evenstride.lab.comparison.sample_script")
    assert spec is not None, "it is part of the package"
    return str(spec.origin)


def compare_real(plan: LabPlan, plot: Path | None, as_json: bool) -> None:
    """Run the policies in the lab, print what they came to, and leave with its exit code.

    Raises:
        EvenstrideError: it cannot be, or failed.
    """
    from evenstride.cli.exit_codes import conclude
    from evenstride.cli.lab_output import perform, tell
    from evenstride.lab.comparison.step_blocks import mean_step_s

    if plot:
        from evenstride.report.suite_figures import check_plotting, check_writable

        check_plotting()
        check_writable(_plot(plan, plot))
    outcome, traces = perform(plan)
    means = {policy: mean_step_s(traces[policy]) for policy in plan.policies}
    try:
        conclude(
            outcome,
            lambda outcome: f"{tell(outcome)}\n\n{_sentence(means)}",
            as_json,
            lambda outcome: {
                "rows": _rows(outcome),
                "mean_step_s": means,
                "comparison": outcome.to_dict(),
            },
        )
    finally:  # after the figures, which a plot that fails must not cost
        if plot:
            _draw(traces, plan, _plot(plan, plot))


def _rows(outcome: Comparison) -> list[dict[str, Any]]:
    """Return rows with the fields of simulated ones; what is not measured is null."""
    from evenstride.sim.scoring.score import FIELDS

    steps_s = {run.policy: run.step_s for run in outcome.runs}
    return [
        {
            **dict.fromkeys(FIELDS),
            "scenario": "real " + "/".join(f"{speed:g}" for speed in outcome.speeds),
            "policy": run.policy,
            "efficiency": run.efficiency,
            "speedup": steps_s[_EQUAL] / run.step_s if _EQUAL in steps_s else None,
            "bound": outcome.bound,
            "linear_bound": outcome.linear_bound,
        }
        for run in outcome.runs
    ]


def _sentence(means: dict[str, float]) -> str:
    """Say how ours stands by the mean of all steps after the cold ones, changes included."""
    others = {policy: mean_s for policy, mean_s in means.items() if policy != _OURS}
    if _OURS not in means or not others:
        return f"Mean step {', '.join(f'{m * 1e3:.1f} ms ({p})' for p, m in means.items())}."
    best = min(others, key=lambda policy: others[policy])
    part = means[_OURS] / others[best] - 1.0
    told = "longer" if part > 0 else "shorter"
    return (
        f"Mean step after the cold block: {_OURS} {means[_OURS] * 1e3:.1f} ms, {abs(part):.1%} "
        f"{told} than the best of the others ({best}, {others[best] * 1e3:.1f} ms)."
    )


def _plot(plan: LabPlan, folder: Path) -> Path:
    return folder / f"real-{'-'.join(f'{speed:g}' for speed in plan.speeds)}.png"


def _draw(traces: dict[str, list[Path]], plan: LabPlan, path: Path) -> None:
    from evenstride.report.suite_figures import draw

    panels = [
        _panel(policy, traces[policy][0], len(plan.speeds), plan.steps) for policy in plan.policies
    ]
    draw(panels, f"real workers at speeds {', '.join(f'{s:g}' for s in plan.speeds)}", path)
    say(f"plot written to {path}", err=True)


def _panel(policy: str, trace: Path, workers: int, steps: int) -> Panel:
    """Return the panel of a run's trace; steps that were not measured are left blank."""
    import numpy as np

    from evenstride.lab.comparison.step_blocks import leader_steps
    from evenstride.report.share_bands import ShareBand
    from evenstride.report.suite_figures import Panel
    from evenstride.trace.run_log import RunLog

    log = RunLog(trace)
    step_s, shares = np.full(steps, np.nan), np.full((workers, steps), np.nan)
    for step, time_s in leader_steps(log):
        step_s[step] = time_s
    for seen in log.observations:
        shares[seen.worker, seen.first_step : seen.first_step + seen.steps] = seen.share
    bands = [ShareBand(f"worker {n}", mine, mine, mine) for n, mine in enumerate(shares)]
    return Panel(policy, {"step": step_s}, bands)
