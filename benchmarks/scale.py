"""Count what liveness and exchanges cost with many ranks: requests, bytes and processor time.

    python benchmarks/scale.py [--ranks 64,256,1024] [--scenes start,exchange] [--json]

All ranks are threads of this process: each has the two threads of evenstride and three connections
to one TCP store, which is a process of its own on the loopback interface. No model is trained. For
each number of ranks, the benchmark prints one line per scene:

* start: the settings of all ranks are compared, and the team is announced
* short steps: heartbeats while steps proceed, per second
* long steps: heartbeats while one step lasts longer than 3 s, per second
* exchange: one decision on 16 steps of all ranks
* mean: one collective call for which the last rank is 2 s late
* loss: the last rank falls silent, and the collectives of all others fail

The columns are figures per rank, as a mean over all ranks: requests to the store, keys in them,
bytes sent and received, and processor time in evenstride's threads. The last three are the requests
of rank 0, the processor time of the store, and how long the scene lasted. Below the table is the
processor time of the leader's decision alone, on 64 steps of all ranks, and how many ranks name the
lost one.

examples:
  python benchmarks/scale.py --ranks 64
  python benchmarks/scale.py --ranks 1024 --scenes exchange,loss
  python benchmarks/scale.py --ranks 64,256,1024 --json
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from statistics import median
from subprocess import PIPE
from typing import Any

import psutil
import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from evenstride.core.control.events import FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker
from evenstride.core.policies import policy_from_spec
from evenstride.errors import WorkerLost
from evenstride.runtime.coordination.agreement import Plain, agree
from evenstride.runtime.coordination.control_plane import Local
from evenstride.runtime.coordination.draw_barrier import DrawBarrier, Position
from evenstride.runtime.coordination.leader import (
    Leader,
    Reply,
    reply_from_text,
    reply_to_text,
    verdict_to_plain,
)
from evenstride.runtime.coordination.leader_start import Lead, make_leader, team_of
from evenstride.runtime.coordination.settings_agreement import compare, show_settings
from evenstride.runtime.coordination.side_agreements import SaveSchedule
from evenstride.runtime.environment import Environment
from evenstride.runtime.failures.peer_link import PeerLink
from evenstride.runtime.loading.position import CommittedPosition
from evenstride.runtime.session.rank_calls import RankCalls, Whereabouts
from evenstride.runtime.settings import Settings, batch_of, settings_of
from evenstride.runtime.store.store_channel import Channel
from evenstride.runtime.store.store_server import serve_store
from evenstride.runtime.timing.device_timer import RankClock
from evenstride.runtime.timing.recorder import Recorder
from evenstride.runtime.timing.step_timer import StepRecord, StepTimer

BATCH = 32  # per rank
PER_MACHINE = 8  # ranks that share a machine, by the names that they report
SCENES = ("start", "short steps", "long steps", "exchange", "mean", "loss")
STEPS = 16  # per exchange
LATE_S = 2.0
WARM_S = 4.5  # a step counts as long after 3 s
CONNECTING = 128  # ranks that connect at the same time
STACK_BYTES = 512 * 1024
CHECKSUM = 0  # the ranks of `decision_s` have no schedule of their own


@dataclass
class Tally:
    """What went through some connections."""

    requests: int = 0
    keys: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    def __sub__(self, before: Tally) -> Tally:
        mine, others = asdict(self), asdict(before)
        return Tally(**{name: mine[name] - others[name] for name in mine})


class CountedStore:
    """A store that counts what one rank asks of it; once ``gone``, every request fails."""

    def __init__(self, store: Store, tally: Tally) -> None:
        self._store, self._tally, self.gone = store, tally, False
        self._lock = threading.Lock()

    def _count(self, keys: list[str], sent: int = 0, received: int = 0) -> None:
        if self.gone:
            raise RuntimeError("this rank is gone")
        with self._lock:
            self._tally.requests += bool(keys)
            self._tally.keys += len(keys)
            self._tally.sent_bytes += sent + sum(map(len, keys))
            self._tally.received_bytes += received

    def set(self, key: str, text: str) -> None:
        """Set a key."""
        self._count([key], sent=len(text))
        self._store.set(key, text)

    def get(self, key: str) -> bytes:
        """Wait for a key."""
        self._count([key])
        value = bytes(self._store.get(key))
        self._count([], received=len(value))
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for keys."""
        self._count(keys)
        values = [bytes(value) for value in self._store.multi_get(keys)]
        self._count([], received=sum(map(len, values)))
        return values

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Set keys."""
        self._count(keys, sent=sum(map(len, values)))
        self._store.multi_set(keys, values)  # type: ignore[attr-defined]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait for keys without reading them."""
        self._count(keys)
        self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """Return whether keys exist."""
        self._count(keys, received=1)
        return bool(self._store.check(keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a number."""
        self._count([key], received=8)
        return int(self._store.add(key, amount))

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        self._count([key])
        return bool(self._store.delete_key(key))


def serve() -> None:
    """Serve a store, print its address, and end when the standard input is closed."""
    with serve_store() as address:
        print(json.dumps(address), flush=True)
        sys.stdin.read()


@contextmanager
def store_process() -> Iterator[tuple[tuple[str, int], psutil.Process]]:
    """Serve a store in a process of its own, and yield its address and that process."""
    with psutil.Popen(
        [sys.executable, __file__, "--serve"], stdin=PIPE, stdout=PIPE, text=True
    ) as process:
        host, port = json.loads(process.stdout.readline())
        try:
            yield (host, port), process
        finally:
            process.stdin.close()
            process.wait(10)


class RankStandIn:
    """One rank's threads and connections, without a model."""

    def __init__(self, rank: int, world_size: int, address: tuple[str, int]) -> None:
        self.tally = Tally()
        timeout = timedelta(seconds=300)
        self.stores = [
            CountedStore(PrefixStore("scale", TCPStore(*address, None, False, timeout)), self.tally)
            for _ in range(3)
        ]
        control, meeting, prompt = self.stores
        self.channel = Channel(rank, world_size, timeout, control, meeting, prompt)  # type: ignore[arg-type]
        self.rank, self.step, self.at = rank, 0, ("idle", -1)
        self.found = ""  # why a collective failed
        self.own_s = 0.0  # processor time on threads of this program that act for the rank

    def join(self, settings: Settings, leads: list[Lead]) -> None:
        """Create what a `Stride` creates. A collective call."""

        def show() -> Plain:
            shown = show_settings(settings, self.rank, None, None)
            machine = f"machine-{self.rank // PER_MACHINE}"
            return {
                **shown,
                "peer": {**shown["peer"], "host": machine, "place": machine + "-" * 60},
            }

        def judge(shown: list[Plain]) -> Plain:
            compare(shown, None)
            lead, formed = make_leader(settings, shown)
            leads.append(lead)
            return formed

        self.team = team_of(
            agree(self.channel, "Stride()", show, judge), self.rank, None, self.channel
        )
        leader = leads[0].leader if self.rank == 0 else None
        if leader is not None:
            leader.skip_opening(0)
        self.gate = DrawBarrier(self.team.shares)
        self.recorder = Recorder(self.rank, lambda: None)
        local = Local(self.gate, self.recorder, self._position, SaveSchedule(lambda: None))
        self.link = PeerLink(local, self.team, leader, lambda: self.at, silent_s=30.0)
        clock = RankClock(StepTimer(self.recorder))
        progress = CommittedPosition(settings.seed, settings.global_batch)
        where = Whereabouts(clock, self.gate, None)
        self.calls = RankCalls(
            *(self.channel, None, clock, self.gate, progress, self.link.beats, where, None)
        )

    def _position(self) -> Position:
        return Position(self.step, ((0, 0, 0),))

    def train(self, step: int) -> None:
        """Finish a step; every fourth rank takes twice as long as the others."""
        share = self.gate.draw(step)[self.rank]
        busy_s = 0.01 + share * (2 if self.rank % 4 == 0 else 1) * 1e-3
        self.recorder.append(StepRecord(step, share, busy_s, 0.01, 0.0, 0.0, 0.0, step > 0))
        self.step, self.at = step + 1, ("between", step)

    def mean(self, late: bool) -> None:
        """Make a collective call."""
        if late:
            time.sleep(LATE_S)
        self.calls.meet("mean()", lambda: {"value": 1.0}, lambda shown: {"n": len(shown)})

    def vanish(self) -> None:
        """Send nothing more, as a process that was killed."""
        for store in self.stores:
            store.gone = True

    def explain(self) -> None:
        """Find out why a collective failed."""
        try:
            self.link.explain_failure()
        except WorkerLost as error:
            self.found = str(error)

    @property
    def cpu_s(self) -> float:
        """Processor time of the rank's threads so far, in seconds."""
        return self.own_s + (self.link.cpu_s if hasattr(self, "link") else 0.0)


@dataclass
class Scene:
    """Figures of one scene; means over the ranks unless stated otherwise."""

    requests: float
    keys: float
    sent_bytes: float
    received_bytes: float
    cpu_s: float
    leader_requests: int  # of rank 0 alone
    leader_cpu_s: float
    store_cpu_s: float  # of the store's process
    lasted_s: float


@dataclass
class ManyRanks:
    """All ranks of a run, and the process of their store."""

    ranks: list[RankStandIn]
    store: psutil.Process
    leads: list[Lead] = field(default_factory=list)

    def together(self, do: Callable[[RankStandIn], None]) -> None:
        """Call a function for each rank, each on a thread of its own, and wait for all."""

        def run(rank: RankStandIn) -> None:
            begun_s = time.thread_time()
            do(rank)
            rank.own_s += time.thread_time() - begun_s

        threads = [threading.Thread(target=run, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def scene(self, play: Callable[[], object], times: float = 1.0) -> Scene:
        """Return the figures of what ``play`` does, divided by ``times``."""
        before = [(replace(rank.tally), rank.cpu_s) for rank in self.ranks]
        store_s, begun_s = sum(self.store.cpu_times()[:2]), time.monotonic()
        play()
        lasted_s = time.monotonic() - begun_s
        done = [rank.tally - tally for rank, (tally, _) in zip(self.ranks, before, strict=True)]
        cpu_s = [rank.cpu_s - was_s for rank, (_, was_s) in zip(self.ranks, before, strict=True)]
        per_rank = times * len(done)
        return Scene(
            requests=sum(one.requests for one in done) / per_rank,
            keys=sum(one.keys for one in done) / per_rank,
            sent_bytes=sum(one.sent_bytes for one in done) / per_rank,
            received_bytes=sum(one.received_bytes for one in done) / per_rank,
            cpu_s=sum(cpu_s) / per_rank,
            leader_requests=round(done[0].requests / times),
            leader_cpu_s=cpu_s[0] / times,
            store_cpu_s=(sum(self.store.cpu_times()[:2]) - store_s) / times,
            lasted_s=lasted_s / times,
        )

    def exchange(self) -> None:
        """Train some steps and let the leader decide on them."""
        first = self.ranks[0].step
        for step in range(first, first + STEPS):
            for rank in self.ranks:
                rank.train(step)
        number = self.ranks[0].link.plane.exchange
        self.ranks[0].link.plane.ask()
        while any(rank.link.plane.exchange == number for rank in self.ranks):
            time.sleep(0.002)
        time.sleep(0.2)  # until all have dropped their keys

    def stand(self, phase: str, seconds: float, moves_s: float | None = None) -> None:
        """Let all training threads be in a phase; with ``moves_s`` the step changes so often."""
        end_s, step = time.monotonic() + seconds, 0
        while (left_s := end_s - time.monotonic()) > 0:
            for rank in self.ranks:
                rank.at = (phase, step)
            time.sleep(left_s if moves_s is None else min(left_s, moves_s))
            step += 1

    def close(self) -> None:
        """End all threads."""
        for rank in self.ranks:
            rank.link.close(at_exit=False)
        # Timers of the ranks that know of the loss, which end a process that hangs.
        while stuck := [one for one in threading.enumerate() if one.name == "evenstride-stuck"]:
            stuck[0].join()


def settings_for(world_size: int) -> Settings:
    """Return the settings of all ranks."""
    return settings_of(
        Environment(),
        batch_of(BATCH * world_size, None, None, averages=True),
        seed=0,
        policy="adaptive",
        sync=None,
        min_share=1,
        max_share=None,
        quantum=1,
        memory_fraction=None,
        trace=None,
        noise_every=0,
        sinks=(),
        alert_below=None,
        engine="auto",
    )


def scenes_of(run: ManyRanks, settings: Settings, seconds: float) -> dict[str, Callable[[], Scene]]:
    """Return what plays each scene, in the order in which they must be played."""
    last = run.ranks[-1]

    def start() -> Scene:
        return run.scene(lambda: run.together(lambda rank: rank.join(settings, run.leads)))

    def short_steps() -> Scene:
        return run.scene(lambda: run.stand("compute", seconds, moves_s=0.5), seconds)

    def long_steps() -> Scene:
        run.stand("compute", WARM_S)
        return run.scene(lambda: run.stand("compute", seconds), seconds)

    def exchange() -> Scene:
        run.exchange()  # the first one teaches the leader the speeds
        return run.scene(run.exchange)

    def mean() -> Scene:
        run.stand("data", 1.5)  # until the heartbeats say so
        return run.scene(lambda: run.together(lambda rank: rank.mean(late=rank is last)))

    def loss() -> Scene:
        def explain(rank: RankStandIn) -> None:
            if rank is not last:
                rank.explain()

        last.vanish()
        return run.scene(lambda: run.together(explain))

    plays = (start, short_steps, long_steps, exchange, mean, loss)
    return {play.__name__.replace("_", " "): play for play in plays}


def measure(
    world_size: int, seconds: float, wanted: list[str], tell: Callable[[str, Scene], None]
) -> dict[str, Any]:
    """Return the figures of the wanted scenes for a number of ranks, and tell them one by one."""
    found, settings = {}, settings_for(world_size)
    with store_process() as (address, process):
        # At once, because each connection waits for look-ups of the peer's name.
        with ThreadPoolExecutor(CONNECTING) as pool:
            ranks = list(pool.map(lambda k: RankStandIn(k, world_size, address), range(world_size)))
        run = ManyRanks(ranks, process)
        for name, play in scenes_of(run, settings, seconds).items():
            if name == "start" or name in wanted:
                found[name] = play()
                tell(name, found[name])
        named = sum(f"rank {ranks[-1].rank} is gone" in rank.found for rank in ranks[:-1])
        run.close()
    scenes = {name: asdict(scene) for name, scene in found.items()}
    return {"scenes": scenes, "named": named, "decision_s": decision_s(world_size)}


def decision_s(world_size: int, steps: int = 64, rounds: int = 5) -> float:
    """Return the processor time of one decision, from the ranks' texts to the leader's text.

    The median over the rounds, in seconds.
    """
    leader, taken_s = Leader(Control(policy_from_spec("adaptive"))), list[float]()
    workers = tuple(Worker(f"machine/{rank}") for rank in range(world_size))
    shares = leader.form(FleetFormed(0, 0, BATCH * world_size, workers)).shares or ()
    leader.skip_opening(0)
    recorders = [Recorder(rank, lambda: None) for rank in range(world_size)]
    for first in range(0, rounds * steps, steps):
        for step in range(first, first + steps):
            for rank, recorder in enumerate(recorders):
                # Jitter without a random number: speeds that repeat every 7 and 5 steps.
                busy_s = 0.01 + shares[rank] * (1 + rank % 7 / 7 + (rank + step) % 5 / 100) * 1e-3
                recorder.append(StepRecord(step, shares[rank], busy_s, 0.01, 0, 0, 0, step > 0))
        step, stands = first + steps, ((0, 0, 0),)
        replies = [Reply(step + 1, CHECKSUM, stands, r.take()) for r in recorders]
        texts = [reply_to_text(reply) for reply in replies]
        begun_s = time.thread_time()
        read = [reply_from_text(text) for text in texts]
        verdict = leader.exchange(step, read, CHECKSUM)
        json.dumps(verdict_to_plain(verdict))
        taken_s.append(time.thread_time() - begun_s)
        shares = verdict.shares or shares
    return median(taken_s[1:])


def head(world_size: int) -> None:
    """Print the head of a table."""
    print(f"--- {world_size} ranks")
    print(" " * 13 + "requests   keys  kB sent  kB read  CPU ms  of rank 0  store CPU ms     s")


def show(name: str, scene: Scene) -> None:
    """Print the figures of a scene."""
    print(
        f"{name:12}{scene.requests:9.1f}{scene.keys:7.0f}{scene.sent_bytes / 1e3:9.2f}"
        f"{scene.received_bytes / 1e3:9.2f}{scene.cpu_s * 1e3:8.2f}{scene.leader_requests:11}"
        f"{scene.store_cpu_s * 1e3:14.0f}{scene.lasted_s:6.2f}",
        flush=True,
    )


def prepare() -> None:
    """Make room for many threads and connections in this process."""
    logging.disable(logging.CRITICAL)  # every rank names the lost one
    threading.stack_size(STACK_BYTES)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    torch.set_num_threads(1)


def main() -> None:
    """Measure each number of ranks and print the figures."""
    about, begin, examples = (__doc__ or "").partition("examples:")
    parser = argparse.ArgumentParser(
        description=about,
        epilog=begin + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", default="64,256,1024", help="numbers of ranks, with commas")
    parser.add_argument("--scenes", default=",".join(SCENES), help="scenes, with commas")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each scene of steps")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    wanted = arguments.scenes.split(",")
    if strange := set(wanted) - set(SCENES):
        parser.error(f"unknown scenes {', '.join(sorted(strange))}; expected {', '.join(SCENES)}")
    prepare()
    found = {}
    for world_size in map(int, arguments.ranks.split(",")):
        if arguments.json:
            found[world_size] = measure(world_size, arguments.seconds, wanted, lambda *_: None)
            continue
        head(world_size)
        figures = measure(world_size, arguments.seconds, wanted, show)
        print(f"decision    {figures['decision_s'] * 1e3:.1f} ms of processor time")
        if "loss" in wanted:
            print(f"{figures['named']} of {world_size - 1} remaining ranks name the lost one")
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
