"""Snapshots for sinks, and a leader with data."""

from __future__ import annotations

from evenstride.core.control.events import FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.diagnostics.alerts import Alert
from evenstride.core.fleet import Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.runtime.coordination.leader import Leader, Reply
from evenstride.runtime.coordination.side_agreements import RankNotices
from evenstride.runtime.sinks.snapshot import NamedMean, Sample, Snapshot

HOSTILE = 'a"b\n{x}\\,\x1b[2J<script>\u202e/0'
"""A name that does what it can to a terminal, a page, a table and a label."""

SLOW = Alert("slow", "b/1", 40, 31, 8, 0.1, 0.25, 0.4, 0.05, 0.25)


def snapshot(step: int = 40, *, busy_s: float = 0.25, workers: str = "ab") -> Snapshot:
    """Return a snapshot of a leader of some workers."""
    return Snapshot(
        1e9,
        step,
        1.5,
        (
            Sample("step_seconds", "", 0.3),
            Sample("changes_total", "", 3.0),
            *(Sample("worker_busy_seconds", name, busy_s) for name in workers),
            Sample("metric", "loss", 0.5),
        ),
    )


def with_news(step: int = 40) -> Snapshot:
    """Return a snapshot with means of earlier steps and an alert."""
    plain = snapshot(step)
    found = (
        NamedMean(step - 2, 1.25, "loss", 0.75),
        NamedMean(step - 1, 1.375, "=1+1", float("nan")),
    )
    return Snapshot(plain.unix_s, step, plain.epochs, plain.samples, found, (SLOW,))


def led(names: tuple[str, ...] = ("a/0", "b/1"), policy: str = "adaptive") -> Leader:
    """Return a leader whose fleet has formed."""
    leader = Leader(Control(policy_from_spec(policy)))
    leader.form(FleetFormed(0, 0, 12, tuple(map(Worker, names))))
    return leader


def exchange(
    leader: Leader, first: int, steps: int, busy_s: tuple[float, ...], notice: int | None = None
) -> None:
    """Send the leader reports of all workers on some steps at their shares, and show them.

    Args:
        leader: the leader.
        first: the first step.
        steps: the number of steps.
        busy_s: busy time of each worker, per step.
        notice: a worker that will be preempted in an hour, if any.
    """
    shares, longest_s = leader.control.rank_shares, max(busy_s)
    noticed = RankNotices(3600.0, False, True, "a test")
    replies = [
        Reply(
            first + steps + 1,
            5,
            (),
            Measurements.of(
                [
                    Observation(
                        worker, share, first, (mine_s,) * steps, (longest_s - mine_s,) * steps, 0.01
                    )
                ]
            ),
            notice=noticed if worker == notice else None,
        )
        for worker, (share, mine_s) in enumerate(zip(shares, busy_s, strict=True))
    ]
    leader.exchange(first + steps, replies, 5)
    leader.finish_exchange()
