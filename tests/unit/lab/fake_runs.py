"""Launches that are over at once and leave the traces of a machine made of numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from evenstride.core.fleet import Shares
from evenstride.lab.comparison.comparison_result import Comparison
from evenstride.lab.comparison.lab_session import LabPlan, Viewer, run_lab
from evenstride.lab.processes.cpu_limits import Limits
from evenstride.lab.processes.local_launch import Launch, LaunchProgress
from tests.unit.lab.traces import write_calibration, write_run

BATCH = 12


@dataclass(slots=True)
class SpyLimits:
    """Limits that only take note."""

    kind: str = "numbers"
    speeds: list[tuple[int, float]] = field(default_factory=list)
    joined: list[tuple[int, int]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    closed: int = 0

    def join(self, worker: int, pid: int) -> None:
        self.joined.append((worker, pid))

    def leave(self, pid: int) -> None:
        self.left.append(pid)

    def set_speed(self, worker: int, speed: float) -> None:
        self.speeds.append((worker, speed))

    def close(self) -> None:
        self.closed += 1


@dataclass(slots=True)
class FakeRuns:
    """Plays `local_launch.run` for two workers with times proportional to the share.

    Args:
        per_sample_s: of both workers.
        tempo: factor on all times of the n-th launch.
        split: split of the adaptive policy, from its first exchange on.
        policy: policy that the script sets itself, if it does.
        sync: mode that the script sets itself, if it does.
        traced: whether the script makes a `Stride`.
        cores: of the machine.
        communication_s: of each step, on top of the slower worker's work.
    """

    per_sample_s: tuple[float, float] = (0.01, 0.02)
    tempo: Callable[[int], float] = lambda _: 1.0
    split: Shares = (8, 4)
    policy: str | None = None
    sync: str | None = None
    traced: bool = True
    cores: int = 2
    communication_s: float = 0.0
    launches: list[Launch] = field(default_factory=list)
    limits: SpyLimits = field(default_factory=SpyLimits)
    caveat: str = ""
    script_steps: int = 1_000_000  # after which the script ends by itself

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of launches, limits and cores."""
        monkeypatch.setattr("evenstride.lab.comparison.lab_session.run", self.run)
        monkeypatch.setattr("evenstride.lab.comparison.lab_session.open_limits", self.open_limits)
        monkeypatch.setattr("evenstride.lab.comparison.lab_session.usable_cpus", lambda: self.cores)

    def open_limits(self, _workers: int) -> tuple[Limits, str]:
        return self.limits, self.caveat

    def run(
        self,
        launch: Launch,
        limits: Limits,
        folder: Path,
        watch: Callable[[LaunchProgress], None] = lambda _: None,
    ) -> float:
        assert limits is self.limits
        self.launches.append(launch)
        tempo = self.tempo(len(self.launches))
        folder.mkdir(parents=True, exist_ok=True)
        watch(LaunchProgress(1, 0.1))
        if self.traced:
            for worker, own in enumerate(launch.alone):
                self._calibrate(worker, own, tempo)
            if not launch.alone:
                self._train(launch.environment, tempo)
        return 1.0

    def policies(self) -> list[str]:
        """Return what was run, in order."""
        return [
            "calibration" if launch.alone else launch.environment["EVENSTRIDE_POLICY"]
            for launch in self.launches
        ]

    def _calibrate(self, worker: int, own: dict[str, str], tempo: float) -> None:
        parts = [float(stage.split(":")[0]) for stage in own["EVENSTRIDE_CALIBRATE"].split(",")]
        sizes = [max(1, round(part * BATCH)) for part in parts]
        times_s = {size: [tempo * size * self.per_sample_s[worker]] * 4 for size in sizes}
        write_calibration(Path(own["EVENSTRIDE_TRACE"]), times_s)

    def _train(self, environment: dict[str, str], tempo: float) -> None:
        policy = self.policy or environment["EVENSTRIDE_POLICY"]
        equal = (BATCH // 2, BATCH // 2)
        splits = [equal, self.split] if policy == "adaptive" else [equal]
        if policy.startswith("static:"):
            first, second = policy.removeprefix("static:").split(",")
            splits = [(int(first), int(second))]
        cold_s, warm_s = (
            tempo * self._step_s(split) + self.communication_s for split in (splits[0], splits[-1])
        )
        steps = min(int(environment["EVENSTRIDE_MAX_STEPS"]), self.script_steps)
        steps_s = [cold_s] * min(steps, 40) + [warm_s] * (steps - 40)
        write_run(
            Path(environment["EVENSTRIDE_TRACE"]),
            policy,
            steps_s,
            splits,
            sync=self.sync or environment.get("EVENSTRIDE_SYNC", "bsp"),
            busy_s=lambda worker, share: tempo * self.busy_s(worker, share),
        )

    def busy_s(self, worker: int, share: int) -> float:
        """Return the busy time of a worker's step in training."""
        return share * self.per_sample_s[worker]

    def _step_s(self, split: Shares) -> float:
        return max(self.busy_s(worker, share) for worker, share in enumerate(split))


def outcome_of(plan: LabPlan, runs: FakeRuns, viewer: Viewer | None = None) -> Comparison:
    """Return what a lab session on these runs comes to."""
    with pytest.MonkeyPatch.context() as patch:
        runs.install(patch)
        return run_lab(plan, viewer or Viewer())
