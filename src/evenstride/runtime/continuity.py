"""What outlives a generation: when to save, who is to leave, what is known of the workers."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from evenstride.core.fleet import Shares
from evenstride.core.profiles import Profile
from evenstride.runtime.agreement import Plain
from evenstride.runtime.desk import Told
from evenstride.runtime.gate import Gate
from evenstride.runtime.leader import Leader
from evenstride.runtime.notices import Notice, Watcher, make_sources
from evenstride.runtime.pace import Pace
from evenstride.runtime.peers import Peer
from evenstride.runtime.saves import Saves
from evenstride.runtime.wire import verdict_from_plain, verdict_to_plain

logger = logging.getLogger("evenstride")

LEFT = 143
"""Exit code of a rank that has left because it was told to: that of a program that SIGTERM ended.

Not 0, as training has not come to its end, and launchers would take it for that.
"""


class Notified:
    """The notice that this rank has, if any, on its way from the watcher to the leader.

    Args:
        ask: asks the leader for an exchange.
        over: whether the run cannot go on anyway. Then a signal to this process ends it at once:
            its launcher waits for it in order to start all again, and the training thread may
            be waiting in a collective for a rank that is lost.
    """

    def __init__(self, ask: Callable[[], None], over: Callable[[], bool]) -> None:
        self._ask, self._over = ask, over
        self._notice: Notice | None = None
        self._watcher: Watcher | None = None

    def watch(self, setting: str, *, polls_clouds: bool) -> None:
        """Watch for notices from now on, as a setting says (see `make_sources`).

        Raises:
            ConfigError: the setting is not understood.
        """
        if self._watcher is None:
            self._watcher = Watcher(
                make_sources(setting, slurm="SLURM_JOB_ID" in os.environ),
                self.changed,
                polls_clouds=polls_clouds,
            )

    def changed(self, notice: Notice | None) -> None:
        """Take note of a notice, or that it was withdrawn (watcher's thread)."""
        if notice is not None and not notice.whole_host and self._over():
            logger.warning(
                "evenstride: %s, and the run cannot go on: this process ends", notice.source
            )
            logging.shutdown()
            os._exit(LEFT)
        self._notice = notice
        self._ask()

    def told(self) -> Told | None:
        """Return what the leader is told (control thread)."""
        notice = self._notice
        if notice is None:
            return None
        left_s = None if notice.leaves_unix_s is None else notice.leaves_unix_s - time.time()
        return Told(left_s, notice.whole_host, not notice.withdrawable, notice.reason)

    def close(self) -> None:
        """Watch no longer."""
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None


class Continuity:
    """One rank's part in what goes on beyond its own process.

    Args:
        ask: asks the leader for an exchange.
        rank: this rank.
        peers: all ranks' processes, in rank order.
        leader: on rank 0 only.
        over: whether the run cannot go on.
    """

    def __init__(
        self,
        ask: Callable[[], None],
        rank: int,
        peers: tuple[Peer, ...],
        leader: Leader | None,
        over: Callable[[], bool],
    ) -> None:
        self.saves, self.notified = Saves(ask), Notified(ask, over)
        self.notices = "auto"
        self._rank, self._leader = rank, leader
        self.pace = Pace(peers)
        self._here = tuple(peer.rank for peer in peers if peer.place == peers[rank].place)
        if leader is not None:
            leader.saves = self.saves

    def watch(self, setting: str | None) -> None:
        """Watch for notices that this rank will be taken away; one rank per machine asks its cloud.

        Args:
            setting: see `make_sources`; ``None`` for what the environment says.

        Raises:
            ConfigError: it is not understood.
        """
        first = self._here[0] == self._rank
        self.notified.watch(setting or self.notices, polls_clouds=first)

    def leads_host(self, going: tuple[int, ...]) -> bool:
        """Return whether this rank is the first of its machine, which goes as a whole.

        A signal to all of its processes does not say so: launchers send it to start them again.
        """
        told = self.notified.told()
        whole = told is not None and told.whole_host
        return whole and self._here[0] == self._rank and set(self._here) <= set(going)

    def remember(self) -> Plain:
        """Return what a checkpoint keeps of the workers (leader only)."""
        assert self._leader is not None, "only rank 0 knows all workers"
        control = self._leader.control
        profiles = [profile.to_plain() for profile in control.known]
        return {
            "generation": control.generation,
            "profiles": profiles,
            "losses": self.pace.remember(),
            "parting": self.saves.parting,
        }

    def recalling(self, step: int, remembered: Plain) -> Callable[[], Plain]:
        """Return what the leader does to recall what a checkpoint has kept.

        Args:
            step: steps committed by this process.
            remembered: what `remember` returned then.
        """

        def lead() -> Plain:
            assert self._leader is not None, "only rank 0 leads"
            profiles = tuple(_profiles(remembered.get("profiles")))
            self.pace.recall(remembered.get("losses"), lost=not remembered.get("parting"))
            verdict = self._leader.recall(step, profiles, _generation(remembered) + 1)
            return {"verdict": verdict_to_plain(verdict)}

        return lead

    def take_up(self, plain: Plain, gate: Gate) -> Shares | None:
        """Put the split in force that the leader has recalled; return it, if it is another."""
        verdict = verdict_from_plain(plain["verdict"])
        if verdict.shares is not None:
            gate.begin_with(verdict.shares)
        return verdict.shares


def _profiles(plain: Any) -> list[Profile]:
    """Return the profiles that can be read; what a checkpoint holds beside them is no harm."""
    profiles = []
    for one in plain if isinstance(plain, list) else []:
        try:
            profiles.append(Profile.from_plain(one))
        except ValueError:
            continue
    return profiles


def _generation(remembered: Plain) -> int:
    generation = remembered.get("generation")
    return generation if isinstance(generation, int) else 0
