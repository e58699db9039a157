"""A phase that trains: waited for, and refused where its script cannot take part."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from evenstride.core.sync_modes.mode_specs import sync_from_spec
from evenstride.errors import ConfigError, LaunchError
from evenstride.lab.online.phase_measurements import facts_of, mode_of
from evenstride.lab.online.phase_processes import PhaseProcesses
from evenstride.planner.tuning.online_forecast import Configuration
from evenstride.planner.workload.leader_processes import Facts

START_S = 600.0
"""For a script to come to its training."""

POLL_S, QUICK_S = 0.05, 0.002
"""How often processes are looked at; and where seconds count."""


@dataclass(slots=True)
class OnlineTraining:
    """A crew that trains, and where it began."""

    script: str  # that it runs, for messages
    crew: PhaseProcesses  # its processes
    choice: Configuration  # its configuration; a batch of 0 until that is known
    first_s: float = 0.0  # when its first step was committed
    began: float = 0.0  # samples trained before it
    length: int = 0  # samples of an epoch; 0 until it is known

    @property
    def samples(self) -> float:
        return float(self.crew.steps * self.choice.batch)

    def await_first_step(self, every_s: float = POLL_S) -> bool:
        """Wait for the first step and note the time; return whether it was made before the end.

        Raises:
            LaunchError: a process failed, or it took too long.
        """
        made = self.until(lambda: self.crew.steps > 0, START_S, "took no step", every_s=every_s)
        self.first_s = time.monotonic()
        return made

    def settle(self, known: Facts) -> None:
        """Take over batch and length of an epoch from the trace, and where training went on."""
        self.choice = Configuration(self.choice.workers, known.global_batch)
        self.length = known.samples
        if (began := self.restored_at(known.samples)) is not None:
            self.began = began

    def restored_at(self, epoch_samples: int) -> float | None:
        """Return how many samples the restored checkpoint had trained; ``None`` without one."""
        restored = self.crew.restored
        if restored is None:
            return None
        return float(restored["epoch"] * epoch_samples + restored["position"])

    def until(
        self,
        done: Callable[[], bool],
        within_s: float,
        failing: str = "was not there",
        *,
        every_s: float = POLL_S,
        beside: PhaseProcesses | None = None,
    ) -> bool:
        """Wait until something is done; return whether it is, rather than that training has ended.

        Raises:
            LaunchError: a process failed, or it took too long.
        """
        until_s = time.monotonic() + within_s
        while not done():
            if beside is not None and beside.ended():
                raise LaunchError(
                    f"{self.script} ended before it made its Checkpointer, when it was started "
                    f"with {beside.phase.workers} workers; see {beside.phase.folder}"
                )
            if self.crew.ended():
                return done()
            if time.monotonic() > until_s:
                raise LaunchError(f"{self.script} {failing} within {within_s:.0f} s")
            time.sleep(every_s)
        return True

    def facts(self) -> Facts:
        """Return what its trace says of the workload, as soon as it does.

        Raises:
            ConfigError: it ended without.
            LaunchError: a process failed.
        """
        found: list[Facts] = []

        def told() -> bool:
            known = facts_of(self.crew.phase.trace)
            found.extend([] if known is None else [known])
            return bool(found)

        if not self.until(told, START_S, "told of no training in its trace"):
            raise ConfigError(
                f"{self.script} ended before it trained a step, or it gave no model to watch(), or "
                "it writes its trace elsewhere; there is nothing to choose for"
            )
        return found[0]

    def check(self, known: Facts, *, open_batch: bool) -> None:
        """Refuse a script that cannot take part.

        Raises:
            ConfigError: it cannot, and what to change.
        """
        if self.crew.ready < self.crew.phase.workers:
            raise ConfigError(
                f"{self.script} trains without an evenstride.Checkpointer, so what it trains would "
                "be lost at every change; make one, and call its restore() before the loop and its "
                "step() after every optimizer step"
            )
        if open_batch and known.global_batch != self.choice.batch:
            raise ConfigError(
                f"{self.script} has a global batch of its own, {known.global_batch}; leave it "
                'open, with Stride(global_batch="auto", bounds=...), or leave out --batches'
            )
        if not sync_from_spec(mode := mode_of(self.crew.phase.trace)).lockstep:
            raise ConfigError(
                f"{self.script} trains with sync={mode}, in which workers do not keep step, so "
                "that nothing can be saved in mid-epoch; use a mode such as bsp"
            )
