"""Every policy in every scenario of the suite, paired by seed: is adaptive ever behind?

    python benchmarks/suite.py [--seeds 20] [--lags 1,3,8] [--policies P,Q,...]
                               [--only SCENARIO,...] [--out results.json]

Two tables, one line per scenario and lag, over all seeds:

* mean `efficiency_mean` of each policy (of the oracle, 1 is best; `informed` is the most that a
  controller can reach) and what the best of the others is;
* adaptive: as a part of `informed`; against the best of the others, seed by seed, with a 95 %
  bootstrap interval of the mean; the same with noise in the times; its settled efficiency; its
  steps to 95 % from cold and after a change, median and 90th percentile; changes of the split
  that gained nothing. FLAG: worse than the best of the others by more than 1 %. noisy: that is
  so with noise only. low: under 0.985 of informed.

Below them the figures that adaptive has to reach, and the time of a decision by fleet size.
A scenario that replays recorded loads is left out if EVENSTRIDE_DATA does not lead to them; a
policy that a scenario cannot serve (static without declared resources) is shown as a dash.
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

from evenstride.core.fleet import FloatArray
from evenstride.core.policies import POLICY_NAMES, policy_from_spec
from evenstride.errors import ConfigError, ScenarioError
from evenstride.sim.loading import load_scenario
from evenstride.sim.run import Simulation
from evenstride.sim.scenario import Scenario
from evenstride.sim.score import Row, Stage

OURS = "adaptive"
SCENARIOS = Path(__file__).parent / "scenarios"
PROCESSES = 2
MOST_BEHIND, LEAST_OF_INFORMED, LEAST_ON_EQUAL, MOST_DECIDE_S = 0.01, 0.985, 0.995, 0.010
RESAMPLES = 2000
FLEET_SIZES = (10, 100, 1_000, 10_000, 100_000)
MOST_SIMULATE_S = 20.0


@dataclass(frozen=True, slots=True)
class Task:
    """One scenario under one lag and seed, for all policies."""

    path: Path
    lag: int
    seed: int
    policies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The rows of a task, or why there are none; and whether anything changes on the way."""

    task: Task
    rows: tuple[Row, ...] = ()
    changes: bool = False
    left_out: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """All that is known of one scenario at one lag: each policy's rows in order of seed."""

    scenario: str
    lag: int
    changes: bool
    rows: dict[str, tuple[Row, ...]]

    def each(self, policy: str, figure: str) -> FloatArray:
        """Return a figure of a policy for each seed, infinite or not a number where it has none."""
        never = math.inf if figure.startswith("steps") else math.nan
        values = [getattr(row, figure) for row in self.rows[policy]]
        return np.array([never if value is None else value for value in values], dtype=np.float64)

    def mean(self, policy: str, figure: str = "efficiency_mean") -> float:
        """Return the mean of a figure over the seeds."""
        return float(self.each(policy, figure).mean())

    @property
    def of_informed(self) -> float:
        """What part of an informed controller's efficiency is ours, over all seeds."""
        return float((self.each(OURS, "efficiency_mean") / self.each(OURS, "informed")).mean())


@dataclass(frozen=True, slots=True)
class Comparison:
    """Adaptive against the best of the others, as a part of it; below 0 if it is behind."""

    best: str
    ahead: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Check:
    """A figure that has to be reached."""

    name: str
    seen: str
    kept: bool


def default_policies() -> tuple[str, ...]:
    """Return all policies, ours first; static in both its forms."""
    others = [name for name in POLICY_NAMES if name not in (OURS, "static")]
    return (OURS, "static", "static:cores", *others)


def perform(task: Task) -> Outcome:
    """Simulate one task, in a process of its own."""
    try:
        scenario = load_scenario(task.path, {"exchange.lag": task.lag})
        stage = Stage.of(scenario, task.seed)
    except ScenarioError as error:
        return Outcome(task, left_out=str(error))
    rows = []
    for policy in task.policies:
        try:
            rows.append(stage.run(policy)[0])
        except ConfigError:  # it needs what this scenario's workers do not declare
            if policy == OURS:
                raise
    return Outcome(task, tuple(rows), bool(stage.timeline.changes))


def perform_all(tasks: Sequence[Task]) -> Iterator[Outcome]:
    """Simulate all tasks in processes, and tell on stderr how far it is."""
    started_s = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        for done, outcome in enumerate(pool.imap_unordered(perform, tasks), start=1):
            if done % math.ceil(len(tasks) / 10) == 0:
                spent_s = time.monotonic() - started_s
                print(f"{done} of {len(tasks)} after {spent_s:.0f} s", file=sys.stderr, flush=True)
            yield outcome


def gather(outcomes: Sequence[Outcome]) -> list[Place]:
    """Return the rows by scenario and lag, each policy's in order of seed."""
    grouped: dict[tuple[str, int], list[Outcome]] = defaultdict(list)
    for outcome in sorted(outcomes, key=lambda o: (o.task.path.stem, o.task.lag, o.task.seed)):
        if outcome.rows:
            grouped[outcome.task.path.stem, outcome.task.lag].append(outcome)
    return [place_of(scenario, lag, some) for (scenario, lag), some in grouped.items()]


def place_of(scenario: str, lag: int, outcomes: Sequence[Outcome]) -> Place:
    """Return what some seeds of one scenario at one lag tell."""
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in (row for outcome in outcomes for row in outcome.rows):
        rows[row.policy].append(row)
    changes = any(outcome.changes for outcome in outcomes)
    return Place(scenario, lag, changes, {policy: tuple(mine) for policy, mine in rows.items()})


def compare(place: Place, figure: str) -> Comparison | None:
    """Return how far ours is ahead of the best of the others; ``None`` if there is no other."""
    others = [policy for policy in place.rows if policy != OURS]
    if not others:
        return None
    best = max(others, key=lambda policy: place.mean(policy, figure))
    ahead = place.each(OURS, figure) / place.each(best, figure) - 1.0
    return Comparison(best, float(ahead.mean()), *interval(ahead))


def interval(values: FloatArray) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean."""
    dice = np.random.default_rng(0)
    means = dice.choice(values, (RESAMPLES, len(values))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def mark(place: Place) -> str:
    """Return what is wrong with ours in this place, empty if nothing is."""
    mean, noisy = compare(place, "efficiency_mean"), compare(place, "efficiency")
    marks = ["low"] if place.of_informed < LEAST_OF_INFORMED else []
    if mean is not None and mean.ahead < -MOST_BEHIND:
        marks.append("FLAG")
    elif noisy is not None and noisy.ahead < -MOST_BEHIND:
        marks.append("noisy")
    return " ".join(marks)


def checks(places: Sequence[Place]) -> Iterator[Check]:
    """Yield the figures that adaptive has to reach, as far as their scenarios were run."""
    for place in places:
        if place.scenario == "reference":
            yield from reference_checks(place)
        elif place.scenario in ("equal-8", "equal-64", "equal-1000"):
            seen = place.mean(OURS)
            name = f"{place.scenario}, lag {place.lag}: at least {LEAST_ON_EQUAL}"
            yield Check(name, f"{seen:.4f}", seen >= LEAST_ON_EQUAL)


def reference_checks(place: Place) -> Iterator[Check]:
    """Yield those of the reference scenario, noise 5 % with 1 % spikes."""
    where, lag = f"reference, lag {place.lag}", place.lag
    part, settled = place.of_informed, float(np.nanmean(place.each(OURS, "efficiency_settled")))
    for what, seen in (("of informed", part), ("settled", settled)):
        name = f"{where}: {what} at least {LEAST_OF_INFORMED}"
        yield Check(name, f"{seen:.4f}", seen >= LEAST_OF_INFORMED)
    for what, figure in (("cold", "steps_to_95_cold"), ("change", "steps_to_95_after_change")):
        steps = place.each(OURS, figure)
        usual, late = np.median(steps), percentile_90(steps)
        kept = bool(usual <= lag + 3 and late <= lag + 6)
        name = f"{where}: steps to 95 % ({what}) at most {lag + 3}, 90th percentile {lag + 6}"
        yield Check(name, f"{usual:.0f}, {late:.0f}", kept)


def percentile_90(steps: FloatArray) -> float:
    """Return the 90th percentile, of values that may be infinite."""
    return float(np.percentile(steps, 90, method="higher"))


def fleet(workers: int, steps: int) -> Scenario:
    """Return a scenario of that many workers of ten kinds."""
    kinds = [
        {"name": f"kind{n}", "count": workers // 10, "samples_per_s": 200 * (n + 1)}
        | {"fixed_s": 0.02, "noise": 0.05, "spike_rate": 0.01}
        for n in range(10)
    ]
    plain = {"name": "fleet", "global_batch": 200 * workers, "steps": steps, "workers": kinds}
    return Scenario.model_validate(plain)


def decide_s(workers: int) -> float:
    """Return the median time of our decisions in seconds."""
    track = Simulation(fleet(workers, 12), policy_from_spec(OURS)).run()
    return float(np.median(track.decide_s))


def speed_checks() -> Iterator[Check]:
    """Yield the time of a decision by fleet size, how it grows, and that of a whole simulation."""
    times_s = {workers: decide_s(workers) for workers in FLEET_SIZES}
    for workers, spent_s in times_s.items():
        limit = f": at most {MOST_DECIDE_S * 1e3:.0f} ms" if workers == 10_000 else ""
        kept = workers != 10_000 or spent_s <= MOST_DECIDE_S
        yield Check(f"a decision, {workers:,} workers{limit}", f"{spent_s * 1e3:.2f} ms", kept)
    for few, many in ((1_000, 10_000), (10_000, 100_000)):
        most = many * math.log(many) / (few * math.log(few))
        seen = times_s[many] / times_s[few]
        name = f"growth from {few:,} to {many:,} workers: at most {most:.1f} (W log W)"
        yield Check(name, f"{seen:.1f}", seen <= most)
    started_s = time.perf_counter()
    Stage.of(fleet(10_000, 1_000), 0).run(OURS)
    spent_s = time.perf_counter() - started_s
    name = f"simulating 10,000 workers x 1,000 steps: at most {MOST_SIMULATE_S:.0f} s"
    yield Check(name, f"{spent_s:.1f} s", spent_s <= MOST_SIMULATE_S)


def policy_table(places: Sequence[Place], policies: Sequence[str]) -> Iterator[str]:
    """Yield the mean efficiency of each policy, line by line."""
    width = 2 + max(8, *(len(policy) for policy in policies))
    heads = "".join(f"{policy:>{width}}" for policy in policies)
    yield f"{'scenario':24}{'lag':>4}{'informed':>10}{heads}"
    for place in places:
        means = [f"{place.mean(p):.4f}" if p in place.rows else "-" for p in policies]
        figures = "".join(f"{mean:>{width}}" for mean in means)
        yield f"{place.scenario:24}{place.lag:>4}{place.mean(OURS, 'informed'):>10.4f}{figures}"


def our_table(places: Sequence[Place]) -> Iterator[str]:
    """Yield how adaptive fares, line by line."""
    yield (
        f"{'scenario':24}{'lag':>4}{'of inf.':>9}  {'against the best other, 95 %':<44}"
        f"{'noisy':>8}{'settled':>9}{'cold':>9}{'change':>13}{'idle':>6}"
    )
    for place in places:
        noisy, settled = compare(place, "efficiency"), place.mean(OURS, "efficiency_settled")
        change = spread(place, "steps_to_95_after_change") if place.changes else "-"
        yield (
            f"{place.scenario:24}{place.lag:>4}{place.of_informed:>9.4f}  {against(place):<44}"
            f"{'-' if noisy is None else f'{noisy.ahead:+.1%}':>8}"
            f"{'-' if math.isnan(settled) else f'{settled:.4f}':>9}"
            f"{spread(place, 'steps_to_95_cold'):>9}{change:>13}"
            f"{place.mean(OURS, 'needless_changes'):>6.1f}  {mark(place)}".rstrip()
        )


def against(place: Place) -> str:
    """Return in words how ours compares with the best of the others."""
    mean = compare(place, "efficiency_mean")
    if mean is None:
        return "-"
    return f"{mean.ahead:+.2%} [{mean.low:+.2%}, {mean.high:+.2%}] {mean.best}"


def spread(place: Place, figure: str) -> str:
    """Return median and 90th percentile of a number of steps."""
    steps = place.each(OURS, figure)
    values = float(np.median(steps)), percentile_90(steps)
    return "/".join("never" if math.isinf(value) else f"{value:.0f}" for value in values)


def verdict(places: Sequence[Place]) -> str:
    """Return in one line whether adaptive is ever behind."""
    flagged = [f"{p.scenario} (lag {p.lag})" for p in places if "FLAG" in mark(p)]
    low = sum(place.of_informed < LEAST_OF_INFORMED for place in places)
    behind = f"behind in {len(flagged)}: {', '.join(flagged)}" if flagged else "never behind"
    return (
        f"verdict: of {len(places)} scenarios and lags, adaptive is {behind}; "
        f"under {LEAST_OF_INFORMED} of informed in {low}"
    )


def report(places: Sequence[Place], policies: Sequence[str], found: Sequence[Check]) -> None:
    """Print everything."""
    print(f"mean efficiency_mean over {len(next(iter(places[0].rows.values())))} seeds\n")
    print("\n".join(policy_table(places, policies)), "\n")
    print("\n".join(our_table(places)), "\n")
    for check in found:
        print(f"{'kept  ' if check.kept else 'MISSED'} {check.name} -> {check.seen}")
    print("\n" + verdict(places))


def listed(text: str) -> list[str]:
    """Return the parts of a list with commas."""
    return text.split(",")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what is asked for."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--lags", type=listed, default=["1", "3", "8"])
    parser.add_argument("--policies", type=listed, default=list(default_policies()))
    parser.add_argument("--only", type=listed, help="scenarios; the time of a decision is left out")
    parser.add_argument("--out", type=Path, help="write all rows here as JSON")
    return parser.parse_args(arguments)


def size_of(path: Path) -> int:
    """Return workers times steps; 0 where the scenario cannot be read, which its task will tell."""
    try:
        scenario = load_scenario(path)
    except ScenarioError:
        if not path.exists():
            raise
        return 0
    return scenario.size * scenario.steps


def tasks_of(asked: argparse.Namespace, policies: tuple[str, ...]) -> list[Task]:
    """Return everything to simulate; large scenarios first, so that no process ends late."""
    names = asked.only or sorted(path.stem for path in SCENARIOS.glob("*.yaml"))
    size = {path: size_of(path) for path in (SCENARIOS / f"{name}.yaml" for name in names)}
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    return [
        Task(path, int(lag), seed, policies)
        for path in sorted(size, key=lambda path: -size[path])
        for lag in asked.lags
        for seed in seeds
    ]


def main() -> None:
    """Simulate, print, write."""
    asked = parse()
    policies = (OURS, *(policy for policy in asked.policies if policy != OURS))
    try:
        tasks = tasks_of(asked, policies)
    except ScenarioError as error:
        raise SystemExit(str(error)) from None
    outcomes = list(perform_all(tasks))
    for stem, why in sorted({(o.task.path.stem, o.left_out) for o in outcomes if o.left_out}):
        print(f"{stem} is left out: {why}")
    places = gather(outcomes)
    if not places:
        raise SystemExit("no scenario is left to compare in")
    found = [*checks(places), *([] if asked.only else speed_checks())]
    report(places, policies, found)
    if asked.out:
        rows = [asdict(row) for place in places for mine in place.rows.values() for row in mine]
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(
            json.dumps({"rows": rows, "checks": [asdict(c) for c in found]}) + "\n"
        )


if __name__ == "__main__":
    main()
