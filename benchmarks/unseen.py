"""Compare adaptive with other policies, in real time, in randomly generated scenarios.

    python benchmarks/unseen.py [--first 0] [--count 120] [--classes mixed,waves,...]
                                [--policies P,Q,...] [--out rows.json]

Each number generates one scenario of one class, which is always the same. It has 2 to 24 workers of
up to four kinds, steps of some milliseconds to seconds, and exchanges after each step, every five
steps or as the leader decides. The authors of the policy also wrote the suite. Random scenarios
reveal rules that fit only the suite.

| class | its scenarios have |
|---|---|
| mixed | noise, spikes, floors, saturation, largest shares, and up to three events |
| first-steps | the same, and a cost of the first step at each new share |
| waves | staircases, with equal and unequal workers, whose quantum is unknown or declared |
| cliffs | times that jump beyond a share |
| noise | noise up to 30 %, also correlated, heavy-tailed and common to all workers |
| interference | recurring interference, faster or slower than the lag |
| drift | random walks, thermal waves and ramps |

Each scenario prints one line: the lead of adaptive in real time over the best published policy and
over the equal split, and its time relative to the informed controller. `behind` marks a deficit of
more than 1 %. Then come a line per class, and the verdict on each target. The exit code is 2 if no
scenario could be simulated, and else 0. The result of one run of 300 steps is partly random.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from evenstride.cli.arguments import split_policies
from evenstride.core.policies import policy_from_spec
from evenstride.errors import ConfigError
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scoring.suite import ScoredScenario, ScoreRow

OURS, EQUAL = "adaptive", "uniform"
# With the window of 1 step that the paper implies, and that of 10 in its authors' code.
OTHERS = (
    "dynamic-batching,dynamic-batching:window=10,lb-bsp-cpu,lb-bsp-cpu:predictor=ema,uniform,"
    "dbs:epoch_steps=10"
)
SIZES = (2, 3, 4, 6, 8, 12, 16, 24)
PROCESSES, STEPS, BEHIND = 2, 300, -0.01
LEAST_MEDIAN, BEHIND_EQUAL = 0.015, -0.005
OF_INFORMED, OF_INFORMED_DECILE = 0.99, 0.97

Plain = dict[str, Any]
Rng = np.random.Generator


def scenario(number: int) -> Scenario:
    """Return the scenario with a number."""
    rng = np.random.default_rng([2026, number])
    size, share = int(rng.choice(SIZES)), int(rng.choice([8, 32, 64, 128]))
    rate = _between(rng, 100, 5000)
    exchange = {"every": [1, 1, 5, "leader"][rng.integers(4)], "lag": int(rng.choice([1, 3, 8]))}
    latency_s = rng.choice([0.0, 0.3]) * rng.random() * share / rate / (2 * size)
    plain: Plain = {
        "name": f"unseen-{number}",
        "global_batch": size * share,
        "steps": STEPS,
        "workers": list(_workers(rng, size, share, rate)),
        "communication": {"latency_s": float(latency_s)},
        "events": list(_events(rng, size)),
        "exchange": exchange,
    }
    CLASSES[class_of(number)](plain, rng)
    return Scenario.model_validate(plain)


def class_of(number: int) -> str:
    return list(CLASSES)[number % len(CLASSES)]


def _mixed(plain: Plain, rng: Rng) -> None:
    del plain, rng


def _first_steps(plain: Plain, rng: Rng) -> None:
    step_s = _share(plain) / max(kind["samples_per_s"] for kind in plain["workers"])
    _all(plain, new_share_s=step_s * _between(rng, 0.3, 30))


def _waves(plain: Plain, rng: Rng) -> None:
    wave, waves = int(rng.choice([8, 16, 32, 64])), int(rng.choice([1, 2, 3, 4, 8, 16]))
    plain["global_batch"] = wave * waves * _size(plain)
    _all(plain, wave=wave, quantum=wave if rng.random() < 0.3 else None)
    _all(plain, max_share=None, saturates_at=None, noise=float(rng.choice([0.005, 0.02, 0.05])))
    if rng.random() < 0.5:
        _alike(plain, rng, spread=0.03)
    plain["events"] = plain["events"][: int(rng.integers(0, 2))]


def _cliffs(plain: Plain, rng: Rng) -> None:
    some = rng.random(len(plain["workers"])) < 0.7
    some[0] = True
    for kind, has in zip(plain["workers"], some.tolist(), strict=True):
        if has:
            kind["cliff_at"] = max(1, int(_share(plain) * rng.uniform(1.0, 1.8)))
            kind["cliff_factor"] = _between(rng, 2, 20)
    if rng.random() < 0.5:
        _alike(plain, rng, spread=0.2)


def _noise(plain: Plain, rng: Rng) -> None:
    _all(plain, noise=float(rng.choice([0.1, 0.15, 0.2, 0.3])), spike_rate=0.0)
    match rng.choice(["plain", "correlated", "heavy", "common", "all"]):
        case "correlated":
            _all(plain, noise_correlation=float(rng.uniform(0.5, 0.95)))
        case "heavy":
            _all(plain, noise_tail=float(rng.uniform(2.5, 5)))
        case "common":
            _all(plain, noise_common=float(rng.uniform(0.3, 0.9)))
        case "all":
            _all(plain, noise_correlation=0.7, noise_tail=4.0, noise_common=0.5)
    if rng.random() < 0.6:
        _alike(plain, rng, spread=0.0)
        plain["events"] = []


def _interference(plain: Plain, rng: Rng) -> None:
    plain["exchange"]["lag"] = int(rng.choice([1, 3, 8, 20]))
    size, events = _size(plain), []
    for _ in range(rng.integers(1, 3)):
        some = rng.choice(size, size=int(rng.integers(1, max(2, size // 2))), replace=False)
        event: Plain = {"at": int(rng.integers(0, 60)), "workers": some.tolist()}
        event |= {"speed": _between(rng, 0.3, 0.8), "phases": str(rng.choice(PHASES))}
        slow = _between(rng, 1, 60)
        if rng.random() < 0.6:
            period = max(2, round(slow / rng.uniform(0.2, 0.6)))
            event |= {"kind": "periodic", "period": period, "duty": min(1.0, slow / period)}
        else:
            event |= {
                "kind": "bursty",
                "mean_steps": slow,
                "mean_gap": max(slow * rng.uniform(0.7, 3), 1.0),
            }
        events.append(event)
    plain["events"] = events


def _drift(plain: Plain, rng: Rng) -> None:
    event: Plain = {"at": 0, "workers": "all", "phases": "separate"}
    match rng.choice(["walk", "wave", "ramps"]):
        case "walk":
            plain["events"] = [{**event, "kind": "walk", "spread": _between(rng, 0.003, 0.03)}]
        case "wave":
            wave = {"speed": rng.uniform(0.5, 0.9), "period": int(rng.integers(40, 300))}
            plain["events"] = [{**event, "kind": "wave", **wave}]
        case _:
            plain["events"] = [
                {"kind": "ramp", "at": int(rng.integers(5, 100)), "workers": worker,
                 "speed": _between(rng, 0.3, 2), "steps": int(rng.integers(50, 200))}
                for worker in range(0, _size(plain), 2)
            ]  # fmt: skip


PHASES = ("common", "separate")
CLASSES: dict[str, Callable[[Plain, Rng], None]] = {
    "mixed": _mixed,
    "first-steps": _first_steps,
    "waves": _waves,
    "cliffs": _cliffs,
    "noise": _noise,
    "interference": _interference,
    "drift": _drift,
}


def _size(plain: Plain) -> int:
    return sum(kind["count"] for kind in plain["workers"])


def _share(plain: Plain) -> int:
    return int(plain["global_batch"] // _size(plain))


def _all(plain: Plain, **fields: Any) -> None:
    """Give all kinds of workers the same values."""
    for kind in plain["workers"]:
        kind.update(fields)


def _alike(plain: Plain, rng: Rng, spread: float) -> None:
    """Make all kinds nearly equally fast, and the same otherwise."""
    first = plain["workers"][0]
    for kind in plain["workers"]:
        kind["fixed_s"] = first["fixed_s"]
        kind["samples_per_s"] = first["samples_per_s"] * (1.0 + spread * float(rng.random()))
        for name in ("floor_s", "saturates_at", "max_share"):
            kind.pop(name, None)


def _between(rng: Rng, low: float, high: float) -> float:
    """Return a random value between two, with a uniform logarithm."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _workers(rng: Rng, size: int, share: int, rate: float) -> Iterator[Plain]:
    """Yield the kinds of workers. ``rate`` is the largest possible speed in samples per second."""
    kinds = min(size, int(rng.integers(1, 5)))
    counts = 1 + rng.multinomial(size - kinds, np.full(kinds, 1 / kinds))
    noise, spikes = rng.choice([0.01, 0.02, 0.05, 0.1]), rng.choice([0.0, 0.005, 0.02])
    fixed_s = rng.uniform(0, 0.6) * share / rate
    for number, count in enumerate(counts.tolist()):
        kind: Plain = {
            "name": f"kind{number}",
            "count": count,
            "samples_per_s": rate / _between(rng, 1, rng.choice([2, 6, 15])),
            "fixed_s": float(fixed_s * rng.choice([0.5, 1, 2])),
            "noise": float(noise * rng.choice([1, 1, 2])),
            "spike_rate": float(spikes),
            "spike_factor": float(rng.choice([2, 3, 6])),
        }
        if rng.random() < 0.1:
            kind["floor_s"] = share / rate * rng.uniform(0.3, 1.2)
        if rng.random() < 0.1:
            kind["saturates_at"] = int(max(2, share * rng.uniform(0.7, 2)))
        if rng.random() < 0.15:
            kind["max_share"] = int(max(4, share * rng.uniform(1.1, 3)))
        yield kind


def _events(rng: Rng, size: int) -> Iterator[Plain]:
    left = False
    for _ in range(rng.integers(0, 4)):
        some = rng.choice(size, size=int(rng.integers(1, max(2, size // 2))), replace=False)
        speed, at = _between(rng, 0.25, 2), int(rng.integers(20, 220))
        event: Plain = {"at": at, "workers": some.tolist(), "speed": speed}
        match rng.choice(["step", "ramp", "periodic", "bursty", "leave"]):
            case "step":
                until = at + int(rng.integers(5, 70))
                yield event | {"kind": "step"} | ({"until": until} if rng.random() < 0.5 else {})
            case "ramp":
                yield event | {"kind": "ramp", "steps": int(rng.integers(5, 60))}
            case "periodic":
                yield event | {"kind": "periodic", "period": int(rng.integers(10, 80))}
            case "bursty":
                lengths = {"mean_steps": rng.uniform(5, 40), "mean_gap": rng.uniform(20, 80)}
                yield event | {"kind": "bursty"} | lengths
            case _ if size > 2 and not left:
                left = True
                yield {"kind": "leave", "at": at, "workers": [int(some[0])]}


def perform(task: tuple[int, tuple[str, ...]]) -> tuple[int, tuple[ScoreRow, ...]]:
    """Simulate one scenario with each policy. Return no rows if no split fits its bounds."""
    number, policies = task
    try:
        stage = ScoredScenario.of(scenario(number), number)
    except (ConfigError, ValidationError):
        return number, ()
    return number, tuple(stage.run(policy)[0] for policy in policies)


@dataclass(frozen=True, slots=True)
class Compared:
    """Adaptive in one scenario, in real time; leads are fractions, negative if it is behind."""

    number: int
    published: float  # lead over the best published policy
    best: str  # that policy
    equal: float  # lead over the equal split
    equal_is_best: bool  # whether the equal split is ahead of all published policies
    informed: float  # time of the informed controller divided by adaptive's
    informed_mean: float  # the same, noise-free

    @classmethod
    def of(cls, number: int, rows: Sequence[ScoreRow]) -> Compared:
        """Compare the first row, which is adaptive's, with the others."""
        ours, *others = rows
        published = [row for row in others if row.policy != EQUAL] or others
        best = max(published, key=lambda row: row.efficiency)
        return cls(
            number,
            ours.efficiency / best.efficiency - 1,
            best.policy,
            ours.speedup - 1,
            ours.efficiency / ours.speedup >= best.efficiency,
            ours.efficiency / ours.informed_real,
            ours.efficiency_mean / ours.informed,
        )

    def __str__(self) -> str:
        known = scenario(self.number)
        happens = ", ".join(event.kind for event in known.events) or "nothing"
        text = (
            f"{self.number:5} {class_of(self.number):13}{self.published:+7.2%} of {self.best:26} "
            f"{self.equal:+8.2%} of equal{'*' if self.equal_is_best else ' '} {self.informed:.3f} "
            f"of informed ({self.informed_mean:.3f} noise-free); {known.size} workers, every "
            f"{known.exchange.every}, lag {known.exchange.lag}: {happens}"
        )
        return text + ("  behind" if self.published < BEHIND else "")


def summary(name: str, found: Sequence[Compared]) -> str:
    """Return the line of a class: median, worst decile and worst of each comparison."""

    def spread(values: Sequence[float], form: str) -> str:
        if not values:
            return " / ".join(["-"] * 3)
        return " / ".join(format(float(np.quantile(values, q)), form) for q in (0.5, 0.1, 0.0))

    equal = [one.equal for one in found if one.equal_is_best]
    return (
        f"{name:13} {len(found):4}  published {spread([c.published for c in found], '+.2%'):28}"
        f"  equal where best ({len(equal)}) {spread(equal, '+.2%'):28}"
        f"  informed {spread([c.informed for c in found], '.3f')}"
        f"  noise-free {spread([c.informed_mean for c in found], '.3f')}"
    )


def verdicts(found: Sequence[Compared]) -> Iterator[str]:
    """Yield a line for each target, in real time."""
    published = [one.published for one in found]
    equal = [one.equal for one in found if one.equal_is_best]
    informed = [one.informed for one in found]
    yield _verdict("published: least lead", min(published), BEHIND, "+.2%")
    yield _verdict("published: median lead", float(np.median(published)), LEAST_MEDIAN, "+.2%")
    if equal:
        yield _verdict("equal split where best: least lead", min(equal), BEHIND_EQUAL, "+.2%")
    yield _verdict("of informed: median", float(np.median(informed)), OF_INFORMED, ".3f")
    decile = float(np.quantile(informed, 0.1))
    yield _verdict("of informed: worst decile", decile, OF_INFORMED_DECILE, ".3f")


def _verdict(name: str, seen: float, least: float, form: str) -> str:
    kept = "kept" if seen >= least else "MISSED"
    return f"{kept:7}{name} {format(seen, form)} (at least {format(least, form)})"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: A list is invalid, a policy is unknown, or there is no scenario.
    """
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="number of the first scenario")
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--classes", default=",".join(CLASSES), help="classes to simulate")
    parser.add_argument("--policies", default=OTHERS, help="policies to compare with")
    parser.add_argument("--out", type=Path, help="file for all rows, as JSON")
    args = parser.parse_args(arguments)
    if args.count < 1 or args.first < 0:
        raise ConfigError(
            f"invalid --first {args.first} or --count {args.count}: expected at least one "
            "scenario, numbered from 0"
        )
    args.classes = args.classes.split(",")
    if unknown := [name for name in args.classes if name not in CLASSES]:
        raise ConfigError(f"invalid --classes {unknown[0]!r}: expected some of {list(CLASSES)}")
    others = [policy for policy in split_policies(args.policies, "--policies") if policy != OURS]
    if not others:
        raise ConfigError(
            f"invalid --policies {args.policies!r}: expected another one than adaptive"
        )
    for policy in others:
        policy_from_spec(policy)
    args.policies = (OURS, *others)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print and write. Return the exit code."""
    try:
        args = parse(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    numbers = range(args.first, args.first + args.count)
    tasks = [(n, args.policies) for n in numbers if class_of(n) in args.classes]
    found, rows = list[Compared](), list[ScoreRow]()
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        for number, some in pool.imap(perform, tasks):
            if some:
                rows += some
                found.append(Compared.of(number, some))
                print(found[-1], flush=True)
    if not found:
        print("no scenario has a split within its bounds; give other numbers", file=sys.stderr)
        return 2
    print("\nmedian / worst decile / worst, in real time")
    for name in args.classes:
        if some_of := [one for one in found if class_of(one.number) == name]:
            print(summary(name, some_of))
    print(summary("all", found))
    print("\n".join(verdicts(found)))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        compared = [{**asdict(one), "class": class_of(one.number)} for one in found]
        result = {"rows": [asdict(row) for row in rows], "compared": compared}
        args.out.write_text(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
