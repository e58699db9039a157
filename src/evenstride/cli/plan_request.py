"""What ``evenstride plan`` is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from evenstride.cli import arguments
from evenstride.errors import ConfigError
from evenstride.planner.search.objective import Objective, Wishes
from evenstride.planner.search.training_forecast import USUAL_SAVES
from evenstride.planner.spot.restart_cost import SaveCosts
from evenstride.planner.workload.target_runs import LOSS, Aim
from evenstride.planner.workload.workload_profile import Links


@dataclass(frozen=True, slots=True)
class TrainingLength:
    """How long training lasts, as on the command line, where one of three options says it."""

    epochs: float | None
    trained: tuple[str, ...]
    target_loss: float | None
    metric: str

    def aim(self) -> Aim | None:
        given = {
            "--epochs": self.epochs is not None,
            "--trained": bool(self.trained),
            "--target-loss": self.target_loss is not None,
        }
        named = [option for option, there in given.items() if there]
        if len(named) > 1:
            raise ConfigError(
                f"how long training lasts is said twice; give {' or '.join(named)}, not both"
            )
        if self.target_loss is None:
            if self.metric != LOSS:
                raise ConfigError(
                    f"--metric is {self.metric!r}, and no --target-loss says what it is to come "
                    "to; give that, or leave --metric out"
                )
            return None
        return Aim(self.target_loss, self.metric)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked for, as on the command line; see there."""

    runs: tuple[Path, ...]
    catalog: Path | None
    length: TrainingLength
    wishes: Wishes
    spot: bool
    batches: str | None
    max_nodes: int
    mixed: bool
    regions: str
    types: str
    transfer: bool
    links: str | None
    types_of_run: str
    restart: str
    live: str
    force: bool
    preemptions: tuple[str, ...] = ()
    sync: str = "bsp"
    script: tuple[str, ...] | None = None

    def saves(self) -> SaveCosts:
        if self.restart and not self.spot:
            raise ConfigError(
                "--restart tells of spot machines; give --spot as well, or leave it out"
            )
        each = arguments.names(self.restart)
        restarts_s = tuple(arguments.seconds(one, "--restart") for one in each)
        return replace(USUAL_SAVES, restart_s=restarts_s) if restarts_s else USUAL_SAVES

    def network(self) -> Links | None:
        if self.links is None:
            return None
        text = self.links
        latency, _, bandwidth = text.partition(":")
        try:
            found = Links(latency_s=float(latency) / 1e3, bytes_per_s=float(bandwidth) * 1e9 / 8)
        except ValueError:  # pydantic's is one, too
            raise ConfigError(
                f"--links is {text!r}; give milliseconds and Gbit/s, such as 0.1:10"
            ) from None
        return found


def wishes_of(
    objective: str | None, deadline: str | None, budget: float | None, confidence: float
) -> Wishes:
    """Return what a plan is to be good at, and its limits.

    Raises:
        ConfigError: something is not understood.
    """
    inf = float("inf")
    if budget is not None and not 0 < budget < inf:
        raise ConfigError(f"--budget is {budget}; give an amount in USD above 0, such as 40")
    return Wishes(
        None if objective is None else _objective(objective),
        inf if deadline is None else arguments.seconds(deadline, "--deadline"),
        inf if budget is None else budget,
        confidence,
    )


def _objective(text: str) -> Objective:
    try:
        return Objective(text)
    except ValueError:
        raise ConfigError(f"--objective is {text!r}; it can be {', '.join(Objective)}") from None
