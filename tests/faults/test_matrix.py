"""After any faults of real workers, the run ends with the weights of one without faults.

Each plan runs on real processes with restarts, and in the simulator: both come to the same list
of generations.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from evenstride.runtime.coordination.run_lifecycle import LEFT
from evenstride.runtime.launching.process_starters import FromZygote
from evenstride.testing.faults.fault_plan import Arrival, Fault, FaultPlan, simulate_plan
from evenstride.testing.faults.supervisor import Job, Outcome, supervise
from tests.faults.elastic_script import PER_EPOCH, check_the_end, reported

SCRIPT = Path(__file__).with_name("elastic_script.py")
EPOCHS, EVERY, DEADLINE_S = 3, 5, 90.0
STEPS = EPOCHS * PER_EPOCH


def plan_of(*faults: Fault, joins: tuple[Arrival, ...] = ()) -> FaultPlan:
    """Return a plan of three workers."""
    workers = ["a", "b", "c"]
    return FaultPlan(
        workers=workers, steps=STEPS, save_every=EVERY, faults=list(faults), joins=list(joins)
    )


PLANS = {
    "nothing": plan_of(),
    "killed": plan_of(Fault(at=12, workers=["b"], kind="kill")),
    "killed for good": plan_of(Fault(at=12, workers=["b"], kind="kill", back="never")),
    "killed and back in mid-epoch": plan_of(Fault(at=12, workers=["b"], kind="kill", back=22)),
    "raises": plan_of(Fault(at=13, workers=["c"], kind="raise")),
    "hangs": plan_of(Fault(at=13, workers=["b"], kind="stop")),
    "the leader": plan_of(Fault(at=17, kind="kill")),
    "two at once": plan_of(Fault(at=13, workers=["b", "c"], kind="kill", back=24)),
    "lost again during the restart": plan_of(
        Fault(at=12, workers=["b"], kind="kill"),
        Fault(at=12, workers=["c"], kind="kill", restart=True),
    ),
    "joined in mid-epoch": plan_of(joins=(Arrival(at=17, workers=["d"]),)),
    "disk full while saving": plan_of(
        Fault(at=15, kind="disk-full"), Fault(at=17, workers=["b"], kind="kill")
    ),
    "newest checkpoint damaged": plan_of(Fault(at=17, kind="corrupt-newest")),
}


def run(
    plan: FaultPlan, folder: Path, zygote: FromZygote, epochs: int = EPOCHS, every: int = EVERY
) -> Outcome:
    """Run a plan on real processes."""
    command = (str(SCRIPT), str(folder), str(epochs), str(every))
    return supervise(Job(command, plan, folder, deadline_s=DEADLINE_S), zygote)


@pytest.mark.parametrize("name", PLANS)
def test_the_run_ends_as_if_nothing_had_happened(
    name: str, tmp_path: Path, zygote: FromZygote
) -> None:
    plan = PLANS[name]

    outcome = run(plan, tmp_path, zygote)

    assert outcome.generations == simulate_plan(plan)
    check_the_end(tmp_path, outcome.generations, EPOCHS)
    assert not zygote.workers()


@pytest.mark.parametrize("victim", ["leader", "another"])
def test_a_run_survives_a_crash_at_every_write_of_a_save(
    victim: str, tmp_path: Path, zygote: FromZygote
) -> None:
    (tmp_path / "undisturbed").mkdir()
    run(plan_of(), tmp_path / "undisturbed", zygote)
    writes = reported(tmp_path / "undisturbed")["writes"]
    points = writes[0] if victim == "leader" else min(writes[1:])
    crashes = [
        Fault(
            at=EVERY * write,
            workers="leader" if victim == "leader" else ["c"],
            kind="crash-in-save",
            write=write,
        )
        for write in range(1, points + 1)
    ]
    plan = plan_of(*crashes)

    outcome = run(plan, tmp_path, zygote)

    assert points >= 1
    assert len(outcome.generations) == points + 1
    assert outcome.generations == simulate_plan(plan)
    check_the_end(tmp_path, outcome.generations, EPOCHS)


def test_a_worker_that_is_asked_to_leave_costs_no_sample(
    tmp_path: Path, zygote: FromZygote
) -> None:
    epochs, every = 12, 20  # long enough to know what a save takes, and to agree on a step
    notice = Fault(at=101, workers=["b"], kind="term", back="never")
    fields = {"workers": ["a", "b", "c"], "steps": epochs * PER_EPOCH, "save_every": every}
    plan = FaultPlan(**fields, faults=[notice])  # type: ignore[arg-type]

    outcome = run(plan, tmp_path, zygote, epochs, every)

    first, second = outcome.generations
    assert first.last_step == second.first_step > notice.at
    # Its own way out, or the launcher's SIGTERM because the others were quicker to end.
    assert outcome.lived[0].codes["b"] in (LEFT, -signal.SIGTERM)
    assert "rank 1 leaves after step" in (tmp_path / "b.log").read_text()
    assert outcome.generations == simulate_plan(plan, left_at={0: first.last_step})
    check_the_end(tmp_path, outcome.generations, epochs)
