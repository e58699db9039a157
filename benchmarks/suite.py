"""Compare every policy with adaptive in every scenario of the suite, paired by seed.

    python benchmarks/suite.py [--seeds 20] [--lags 1,3,8] [--policies P,Q,...]
                               [--only SCENARIO,...] [--out results.json]

The benchmark prints two tables with one line per scenario and lag, over all seeds:

* The mean `efficiency_mean` of each policy. It is relative to the oracle, so 1 is best. `informed`
  is the most that a controller can reach.
* The results of adaptive: its efficiency relative to `informed`, and its lead over the best other
  policy by seed, with a 95 % bootstrap interval of the mean. Further columns are its `efficiency`
  with noise in the times, and its lead in that. Then follow its settled `efficiency_mean`, its
  steps to 95 % from cold and after a change (median and 90th percentile), and changes of the split
  without a gain. FLAG marks a deficit of more than 1 %, "noisy" the same in `efficiency`, and "low"
  less than 0.985 of `informed`.

Below, it prints the figures that adaptive has to reach, and the time of a decision by fleet size.
The exit code is 1 if a figure is missed or a line has a FLAG, and 2 if no scenario could be
simulated. Steps after a change do not count seeds without a change at least lag + 10 steps before
the end.

DBS and OmniLearn decide once per epoch, which has 100 steps by default. The scenarios of their
schedules have shorter epochs: 10 steps for DBS, and several per level for OmniLearn. So both also
run with 10 steps. A scenario that replays recorded loads is left out if EVENSTRIDE_DATA does not
have them. A dash marks a policy that cannot serve a scenario, such as static without declared
resources.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from evenstride.cli.arguments import split_lags, split_policies
from evenstride.core.policies import POLICY_NAMES, policy_from_spec
from evenstride.errors import ConfigError, ScenarioError
from evenstride.sim.engine.lockstep import Simulation
from evenstride.sim.scenario import builtin_scenarios
from evenstride.sim.scenario.recordings import load_recording
from evenstride.sim.scenario.scenario_events import LoadReplay
from evenstride.sim.scenario.scenario_file import load_scenario, read_yaml
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scoring.suite import ScoredScenario, ScoreRow, Unfit, unfit

# A script has only its own folder on the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.judging import OURS, Check, Place, checks, marks, our_table, policy_table, verdict

SCENARIOS = builtin_scenarios.SCENARIOS
PROCESSES = 2
FLEET_SIZES = (10, 100, 1_000, 10_000, 100_000)
MOST_DECIDE_S, MOST_SIMULATE_S = 0.010, 20.0
VARIANTS = (
    "dbs:epoch_steps=10",
    "dynamic-batching:window=10",
    "lb-bsp-cpu:predictor=ema",
    "lb-bsp-gpu:version=2018",
    "omnilearn:epoch_steps=10",
)


@dataclass(frozen=True, slots=True)
class Task:
    """One scenario with one lag and seed, for all policies that can serve it."""

    path: Path
    lag: int
    seed: int
    policies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cast:
    """A scenario with the policies that can serve it, and those that cannot."""

    path: Path
    size: int
    served: tuple[str, ...]
    unfit: tuple[Unfit, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The scenarios to simulate, and the reasons for those that are left out."""

    casts: tuple[Cast, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The rows of a task, and whether any speed changes early enough to be followed."""

    task: Task
    rows: tuple[ScoreRow, ...]
    changes: bool


def default_policies() -> tuple[str, ...]:
    """Return all policies, adaptive first, including variants as published."""
    others = [name for name in POLICY_NAMES if name not in (OURS, "static")]
    return (OURS, "static", "static:cores", *sorted([*others, *VARIANTS]))


def plan(args: argparse.Namespace) -> Plan:
    """Return the scenarios to simulate, with the policies that can serve each.

    Raises:
        ConfigError: A policy is unknown, a scenario is invalid, or adaptive cannot serve one.
    """
    policies = (OURS, *(policy for policy in args.policies if policy != OURS))
    for policy in policies:
        policy_from_spec(policy)
    casts, missing = list[Cast](), list[str]()
    for name in args.only or sorted(path.stem for path in SCENARIOS.glob("*.yaml")):
        path = SCENARIOS / f"{name}.yaml"
        try:
            casts.append(cast_of(path, load_scenario(path), policies))
        except ScenarioError as error:
            if not lacks_recording(path):
                raise
            missing.append(f"{name} is left out: {error}")
    return Plan(tuple(casts), tuple(missing))


def cast_of(path: Path, scenario: Scenario, policies: Sequence[str]) -> Cast:
    """Return a scenario with the policies that can serve it.

    Raises:
        ConfigError: adaptive cannot serve it.
    """
    reasons = {policy: unfit(policy, scenario) for policy in policies}
    if reasons[OURS]:
        raise ConfigError(f"{path.stem}: {reasons[OURS]}")
    served = tuple(policy for policy in policies if not reasons[policy])
    unfits = [Unfit(policy, path.stem, reason) for policy, reason in reasons.items() if reason]
    return Cast(path, scenario.size * scenario.steps, served, tuple(unfits))


def tasks_of(args: argparse.Namespace, casts: Sequence[Cast]) -> list[Task]:
    """Return each scenario with each lag and seed, large ones first, to keep all processes busy."""
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    return [
        Task(cast.path, lag, seed, cast.served)
        for cast in sorted(casts, key=lambda cast: -cast.size)
        for lag in args.lags
        for seed in seeds
    ]


def lacks_recording(path: Path) -> bool:
    """Return whether a valid scenario replays a recording that is missing."""
    try:
        scenario = Scenario.model_validate(read_yaml(path).plain)
    except ValidationError:
        return False
    days = {event.day for event in scenario.events if isinstance(event, LoadReplay)}
    return not all(map(is_readable, days))


def is_readable(day: str) -> bool:
    """Return whether the recording of a day can be read."""
    try:
        load_recording(day)
    except ScenarioError:
        return False
    return True


def perform(task: Task) -> Outcome:
    """Simulate one task."""
    scenario = load_scenario(task.path, {"exchange.lag": task.lag})
    stage = ScoredScenario.of(scenario, task.seed)
    rows = tuple(stage.run(policy)[0] for policy in task.policies)
    return Outcome(task, rows, bool(stage.judged))


def perform_all(tasks: Sequence[Task]) -> Iterator[Outcome]:
    """Simulate all tasks in processes, and print the progress to stderr."""
    started_s = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        for done, outcome in enumerate(pool.imap_unordered(perform, tasks), start=1):
            if done % math.ceil(len(tasks) / 10) == 0:
                spent_s = time.monotonic() - started_s
                print(f"{done} of {len(tasks)} after {spent_s:.0f} s", file=sys.stderr, flush=True)
            yield outcome


def gather(outcomes: Sequence[Outcome]) -> list[Place]:
    """Return the rows by scenario and lag, those of each policy in order of seed."""
    grouped: dict[tuple[str, int], list[Outcome]] = defaultdict(list)
    for outcome in sorted(outcomes, key=lambda o: (o.task.path.stem, o.task.lag, o.task.seed)):
        grouped[outcome.task.path.stem, outcome.task.lag].append(outcome)
    return [place_of(scenario, lag, some) for (scenario, lag), some in grouped.items()]


def place_of(scenario: str, lag: int, outcomes: Sequence[Outcome]) -> Place:
    """Return the results of one scenario at one lag."""
    rows: dict[str, list[ScoreRow]] = defaultdict(list)
    for row in (row for outcome in outcomes for row in outcome.rows):
        rows[row.policy].append(row)
    changes = tuple(outcome.changes for outcome in outcomes)
    return Place(scenario, lag, changes, {policy: tuple(mine) for policy, mine in rows.items()})


def fleet(workers: int, steps: int) -> Scenario:
    """Return a scenario with workers of ten kinds."""
    kinds = [
        {"name": f"kind{n}", "count": workers // 10, "samples_per_s": 200 * (n + 1)}
        | {"fixed_s": 0.02, "noise": 0.05, "spike_rate": 0.01}
        for n in range(10)
    ]
    plain = {"name": "fleet", "global_batch": 200 * workers, "steps": steps, "workers": kinds}
    return Scenario.model_validate(plain)


def decide_s(workers: int) -> float:
    """Return the median time of a decision by adaptive in seconds."""
    track = Simulation(fleet(workers, 12), policy_from_spec(OURS)).run()
    return float(np.median(track.decide_s))


def speed_checks() -> Iterator[Check]:
    """Yield the time of a decision by fleet size, its growth, and the time of a simulation."""
    times_s = {workers: decide_s(workers) for workers in FLEET_SIZES}
    for workers, spent_s in times_s.items():
        limit = f": at most {MOST_DECIDE_S * 1e3:.0f} ms" if workers == 10_000 else ""
        kept = workers != 10_000 or spent_s <= MOST_DECIDE_S
        yield Check(f"a decision, {workers:,} workers{limit}", f"{spent_s * 1e3:.2f} ms", kept)
    for few, many in ((1_000, 10_000), (10_000, 100_000)):
        most = many * math.log(many) / (few * math.log(few))
        seen = times_s[many] / times_s[few]
        name = f"growth from {few:,} to {many:,} workers: at most {most:.2f} (W log W)"
        yield Check(name, f"{seen:.2f}", seen <= most)
    started_s = time.perf_counter()
    ScoredScenario.of(fleet(10_000, 1_000), 0).run(OURS)
    spent_s = time.perf_counter() - started_s
    name = f"simulating 10,000 workers x 1,000 steps: at most {MOST_SIMULATE_S:.0f} s"
    yield Check(name, f"{spent_s:.1f} s", spent_s <= MOST_SIMULATE_S)


def report_left_out(planned: Plan) -> None:
    """Print the scenarios and policies that are left out, with reasons."""
    for line in planned.missing:
        print(line)
    unfits = [one for cast in planned.casts for one in cast.unfit]
    for policy in dict.fromkeys(one.policy for one in unfits):
        first, *more = [one for one in unfits if one.policy == policy]
        where = f"{first.scenario} and {len(more)} more" if more else first.scenario
        print(f"{policy} is left out of {where}: {first.reason}")


def report(places: Sequence[Place], policies: Sequence[str], found: Sequence[Check]) -> None:
    """Print both tables, the checks and the verdict."""
    print(f"\nmean efficiency_mean over {len(places[0].changes)} seeds\n")
    print("\n".join(policy_table(places, policies)), "\n")
    print("\n".join(our_table(places)), "\n")
    for check in found:
        print(f"{'kept  ' if check.kept else 'MISSED'} {check.name} -> {check.seen}")
    print("\n" + verdict(places))


def write(path: Path, places: Sequence[Place], found: Sequence[Check]) -> None:
    """Write all rows and checks to a file."""
    rows = [asdict(row) for place in places for mine in place.rows.values() for row in mine]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": rows, "checks": [asdict(c) for c in found]}) + "\n")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: A list is invalid, or there is no seed.
    """
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--lags", default="1,3,8")
    parser.add_argument("--policies", default=",".join(default_policies()))
    parser.add_argument("--only", help="scenarios; skips the time of a decision")
    parser.add_argument("--out", type=Path, help="file for all rows, as JSON")
    args = parser.parse_args(arguments)
    if args.seeds < 1 or args.first_seed < 0:
        raise ConfigError(
            f"invalid --seeds {args.seeds} or --first-seed {args.first_seed}: expected at least "
            "one seed, numbered from 0"
        )
    args.lags, args.only = split_lags(args.lags), args.only and args.only.split(",")
    args.policies = split_policies(args.policies, "--policies")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print and write. Return the exit code."""
    try:
        args = parse(arguments)
        planned = plan(args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    report_left_out(planned)
    if not planned.casts:
        print("no scenario can be simulated; see the reasons above", file=sys.stderr)
        return 2
    places = gather(list(perform_all(tasks_of(args, planned.casts))))
    found = [*checks(places), *([] if args.only else speed_checks())]
    report(places, list(dict.fromkeys((OURS, *args.policies))), found)
    if args.out:
        write(args.out, places, found)
    missed = any(not check.kept for check in found)
    return int(missed or any("FLAG" in marks(place) for place in places))


if __name__ == "__main__":
    raise SystemExit(main())
