"""Run the demo from the outside: limits, workers, news, result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenstride.lab.comparison.comparison_result import Comparison
from evenstride.lab.demo.demo_figures import compare
from evenstride.lab.demo.demo_schedule import NEWS, REPORT, TRACE, DemoSchedule, Report
from evenstride.lab.demo.fashion_mnist import check_data
from evenstride.lab.limits.cpu_limits import open_limits
from evenstride.lab.limits.speeds import Speeds, check_fit, usable_cpus
from evenstride.lab.processes.local_launch import Launch, LaunchProgress, run
from evenstride.lab.processes.trial_checkpoints import make_folder
from evenstride.trace.follow import LineTail

_SCRIPT = Path(__file__).with_name("demo_script.py")

News = Callable[[dict[str, Any]], None]
"""Called with what goes on, as it happens."""


def run_demo(
    plan: DemoSchedule, speeds: Speeds, news: News, watch: Callable[[], None] = lambda: None
) -> Comparison:
    """Return the outcome of one demo.

    Raises:
        ConfigError: the speeds do not fit this machine, or the data is missing.
        LaunchError: a worker failed.
        LimitError: a limit could not be kept.
    """
    check_fit(speeds, usable_cpus())
    check_data(plan.data)
    make_folder(plan.folder)
    for name in (NEWS, REPORT, TRACE):  # of an earlier demo in this folder
        (plan.folder / name).unlink(missing_ok=True)
    plan.save(plan.folder / "plan.json")
    limits, caveat = open_limits(len(speeds))
    news({"what": "limits", "kind": limits.kind, "caveat": caveat})
    launch = Launch(
        command=(str(_SCRIPT), str(plan.folder / "plan.json")),
        speeds=speeds,
        environment={"EVENSTRIDE_TRACE": "", "EVENSTRIDE_POLICY": "", "EVENSTRIDE_MAX_STEPS": ""},
        deadline_s=1200.0,
    )
    tail = LineTail(plan.folder / NEWS)

    def look(_: LaunchProgress) -> None:
        for item in tail.records():
            news(item)
        watch()

    try:
        run(launch, limits, plan.folder, look)
        look(LaunchProgress(0, 0.0))
    finally:
        limits.close()
    report = Report.load(plan.folder / REPORT)
    outcome = compare(report, speeds, limits.kind, str(plan.folder / TRACE))
    return replace(outcome, caveats=(caveat,) if caveat else ())
