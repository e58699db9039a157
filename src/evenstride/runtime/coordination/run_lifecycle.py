"""State that outlives a generation: saves, departures, and what is known of the workers.

The leader derives the interval between saves from the preemptions and crashes seen in the run.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from evenstride.core.control.events import Recalled
from evenstride.core.fleet import Shares
from evenstride.core.membership.worker_profiles import WorkerProfile
from evenstride.core.reliability.checkpoint_interval import (
    Observed,
    Saving,
    expected_losses,
    next_save_in_s,
)
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.coordination.leader import Leader, verdict_from_plain, verdict_to_plain
from evenstride.runtime.coordination.side_agreements import RankNotices, SaveSchedule
from evenstride.runtime.failures.peers import Peer
from evenstride.runtime.notices import Notice, NoticeWatcher, make_sources

logger = logging.getLogger("evenstride")

LEFT = 143
"""Exit code of a rank that leaves after a notice: that of a program ended by SIGTERM.

It is not 0, which launchers would take as the end of training.
"""


class Pace:
    """Counts failures over all generations of a run, and plans the next save.

    A machine counts once, with its age at the time its ranks met.
    """

    def __init__(self, peers: Iterable[Peer], clock: Callable[[], float] = time.monotonic) -> None:
        ages_s = {peer.place: peer.up_s for peer in peers}
        self._ages_s = np.array(list(ages_s.values()), dtype=np.float64)
        self._clock, self._begun_s = clock, clock()
        self._before = Observed()
        self.saving = Saving()
        """Model of the machines' lifetimes, and bounds of the interval."""

    def save_by(self, saving: Saving) -> None:
        """Use another model of lifetimes, with its bounds."""
        self.saving = saving

    @property
    def observed(self) -> Observed:
        """Failures so far, in this generation of the run and in earlier ones."""
        since_s = self._ages_s + (self._clock() - self._begun_s)
        expected = expected_losses(self.saving.lifetime, self._ages_s, since_s)
        return Observed(self._before.failures, self._before.expected + expected)

    def interval_s(self, save_s: float) -> float:
        """Return the seconds until the next save, which takes ``save_s``."""
        now_s = self._ages_s + (self._clock() - self._begun_s)
        # The age of each machine decides how likely its end is in the next hours.
        # A small save may measure as 0 s; a test's clock may stand still.
        planned = next_save_in_s(max(save_s, 1e-4), now_s, self.observed, self.saving)
        logger.debug("%s", planned.reason)
        return planned.in_s

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        observed = self.observed
        return {"failures": observed.failures, "expected": observed.expected}

    def recall(self, remembered: Any, *, lost: bool) -> None:
        """Continue to count from what a checkpoint has kept; ignore it if it is malformed.

        ``lost`` is whether the generation that saved it ended in a failure. A run that starts again
        from a checkpoint was interrupted, unless the interruption was announced.
        """
        plain = remembered if isinstance(remembered, dict) else {}
        failures, expected = plain.get("failures"), plain.get("expected")
        if not (isinstance(failures, int) and isinstance(expected, int | float)):
            return
        if failures >= 0 and 0.0 <= expected < float("inf"):
            self._before = Observed(failures + lost, float(expected))


class Notified:
    """Passes this rank's notice, if it has one, from the watcher to the leader.

    ``over`` returns whether the run cannot continue anyway. A signal then ends this process at
    once: its launcher waits for it in order to restart all, and the training thread may wait in a
    collective for a lost rank.
    """

    def __init__(self, ask: Callable[[], None], over: Callable[[], bool]) -> None:
        self._ask, self._over = ask, over
        self._notice: Notice | None = None
        self._watcher: NoticeWatcher | None = None

    def watch(self, setting: str, *, polls_clouds: bool) -> None:
        """Watch for notices from now on, by a setting of `make_sources`."""
        if self._watcher is None:
            self._watcher = NoticeWatcher(
                make_sources(setting, slurm="SLURM_JOB_ID" in os.environ),
                self.changed,
                polls_clouds=polls_clouds,
            )

    def changed(self, notice: Notice | None) -> None:
        """Note a notice, or that it was withdrawn (watcher's thread)."""
        if notice is not None and not notice.whole_host and self._over():
            logger.warning(
                "evenstride: %s, and the run cannot continue: this process ends", notice.source
            )
            # sys.exit would end only the watcher's thread.
            logging.shutdown()
            os._exit(LEFT)
        self._notice = notice
        self._ask()

    def report(self) -> RankNotices | None:
        """Return what this rank reports to the leader (control thread)."""
        notice = self._notice
        if notice is None:
            return None
        left_s = None if notice.leaves_unix_s is None else notice.leaves_unix_s - time.time()
        return RankNotices(left_s, notice.whole_host, not notice.withdrawable, notice.reason)

    def close(self) -> None:
        """Stop watching."""
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None


class RunLifecycle:
    """One rank's part in what outlives its process.

    ``leader`` is ``None`` except on rank 0. ``notices`` is the setting of `make_sources` that is
    used unless `watch` gets another one.
    """

    def __init__(
        self,
        ask: Callable[[], None],
        rank: int,
        peers: tuple[Peer, ...],
        leader: Leader | None,
        over: Callable[[], bool],
        notices: str = "auto",
    ) -> None:
        self.saves, self.notified = SaveSchedule(ask), Notified(ask, over)
        self.notices = notices
        self._rank, self._leader = rank, leader
        self.pace = Pace(peers)
        self._here = tuple(peer.rank for peer in peers if peer.place == peers[rank].place)
        if leader is not None:
            leader.save_with(self.saves)

    def watch(self, setting: str | None) -> None:
        """Watch for notices that this rank will be preempted; ``None`` uses the environment.

        See `make_sources`. One rank per machine asks the cloud provider.
        """
        # A cloud preempts whole machines, so one rank of each machine asks for all.
        first = self._here[0] == self._rank
        self.notified.watch(setting or self.notices, polls_clouds=first)

    def leads_host(self, going: tuple[int, ...]) -> bool:
        """Return whether this rank is the first of its machine and the whole machine is leaving.

        A signal to all processes does not mean that: launchers also send it to restart them.
        """
        notice = self.notified.report()
        whole = notice is not None and notice.whole_host
        return whole and self._here[0] == self._rank and set(self._here) <= set(going)

    def remember(self) -> Plain:
        """Return what a checkpoint keeps of the workers (leader only)."""
        assert self._leader is not None, "only rank 0 knows all workers"
        control = self._leader.control
        # With their profiles, workers that come back start at their former shares.
        profiles = [profile.to_plain() for profile in control.known]
        return {
            "generation": control.generation,
            "profiles": profiles,
            "losses": self.pace.remember(),
            "parting": self.saves.parting,
        }

    def recalling(self, step: int, remembered: Plain) -> Callable[[], Plain]:
        """Return the function by which the leader restores what a checkpoint has kept."""

        def lead() -> Plain:
            assert self._leader is not None, "only rank 0 leads"
            profiles = tuple(_profiles(remembered.get("profiles")))
            self.pace.recall(remembered.get("losses"), lost=not remembered.get("parting"))
            verdict = self._leader.recall(
                Recalled(step, step, profiles, _generation(remembered) + 1)
            )
            return {"verdict": verdict_to_plain(verdict)}

        return lead

    def take_up(self, plain: Plain, gate: DrawBarrier) -> Shares | None:
        """Put the split that the leader has restored into force; return it if it is another."""
        verdict = verdict_from_plain(plain["verdict"])
        if verdict.shares is not None:
            gate.begin_with(verdict.shares)
        return verdict.shares


def _profiles(plain: Any) -> list[WorkerProfile]:
    profiles = []
    for one in plain if isinstance(plain, list) else []:
        try:
            profiles.append(WorkerProfile.from_plain(one))
        except ValueError:  # of another version; that worker is measured again
            continue
    return profiles


def _generation(remembered: Plain) -> int:
    generation = remembered.get("generation")
    return generation if isinstance(generation, int) else 0
