"""What outlives a process: notices on their way, what is known of workers, and how a rank ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from evenstride.core.control.events import FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker
from evenstride.core.membership.worker_profiles import WorkerProfile
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.errors import ConfigError, WorkerLost
from evenstride.runtime.checkpoint import endings
from evenstride.runtime.coordination import run_lifecycle as module
from evenstride.runtime.coordination.leader import Leader, Reply
from evenstride.runtime.coordination.run_lifecycle import LEFT, RunLifecycle
from evenstride.runtime.failures.peers import Peer
from evenstride.runtime.launching import torchrun_agent
from evenstride.runtime.notices import Notice
from tests.messages import check_message, raises_message

PEERS = tuple(Peer(k, "h", "one" if k < 2 else "two", 100 + k) for k in range(3))


def _leader() -> Leader:
    return Leader(Control(policy_from_spec("adaptive")))


def _lifecycle(
    rank: int = 0,
    *,
    over: bool = False,
    asked: list[bool] | None = None,
    leader: Leader | None = None,
) -> RunLifecycle:
    if rank == 0:
        leader = leader or _leader()
    tell = (lambda: asked.append(True)) if asked is not None else (lambda: None)
    return RunLifecycle(tell, rank, PEERS, leader, lambda: over)


def _notice(left_s: float | None = 60.0, *, whole_host: bool = False) -> Notice:
    at_s = None if left_s is None else time.time() + left_s
    return Notice("SIGTERM", at_s, whole_host, not whole_host, "a test")


def test_a_notice_requests_an_exchange_and_is_reported_with_the_time_left() -> None:
    asked: list[bool] = []
    notified = _lifecycle(asked=asked).notified
    assert notified.report() is None
    notified.changed(_notice())
    notice = notified.report()
    assert notice is not None
    assert notice.left_s == pytest.approx(60.0, abs=5.0)
    assert (notice.whole_host, notice.final, notice.why) == (False, False, "a test")
    notified.changed(_notice(None, whole_host=True))
    notice = notified.report()
    assert notice is not None
    assert (notice.left_s, notice.final) == (None, True)
    notified.changed(None)
    assert notified.report() is None
    assert len(asked) == 3


def test_a_signal_ends_a_process_whose_run_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    _lifecycle(over=True).notified.changed(_notice(whole_host=True))
    assert not codes, "a machine that goes later is no reason to end at once"
    _lifecycle(over=False).notified.changed(_notice())
    assert not codes
    _lifecycle(over=True).notified.changed(_notice())
    assert codes == [LEFT]


def test_the_first_rank_of_a_machine_that_goes_speaks_for_it() -> None:
    def leads(rank: int, going: tuple[int, ...], *, whole_host: bool = True) -> bool:
        lifecycle = _lifecycle(rank)
        assert not lifecycle.leads_host(going), "no notice of the machine"
        lifecycle.notified.changed(_notice(whole_host=whole_host))
        return lifecycle.leads_host(going)

    assert leads(0, (0, 1))
    assert not leads(1, (0, 1))
    assert not leads(0, (0,)), "the other one stays"
    assert leads(2, (2,))
    assert not leads(2, (2,), whole_host=False), "who starts it again sends signals, too"


class _Watcher:
    """A watcher that notes what it was made for."""

    made: ClassVar[list[_Watcher]] = []

    def __init__(self, sources: Any, changed: Any, *, polls_clouds: bool) -> None:
        self.sources, self.changed = sources, changed
        self.polls_clouds, self.closed = polls_clouds, False
        self.made.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def watchers(monkeypatch: pytest.MonkeyPatch) -> list[_Watcher]:
    """Return the watchers that were made; a source is represented by its setting."""
    monkeypatch.setattr(_Watcher, "made", [])
    monkeypatch.setattr(module, "NoticeWatcher", _Watcher)
    monkeypatch.setattr(module, "make_sources", lambda setting, *, slurm: (setting, slurm))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return _Watcher.made


def test_one_rank_of_each_machine_asks_its_cloud(watchers: list[_Watcher]) -> None:
    for rank in range(3):
        _lifecycle(rank).watch("signals")

    assert [one.polls_clouds for one in watchers] == [True, False, True]


def test_watched_notice_sources_come_from_the_argument_or_the_environment(
    watchers: list[_Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    lifecycle = _lifecycle()
    lifecycle.notices = "gcp"
    lifecycle.watch(None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    _lifecycle().watch("aws")

    assert [one.sources for one in watchers] == [("gcp", False), ("aws", True)]


def test_notices_are_watched_by_one_watcher_until_it_is_closed(watchers: list[_Watcher]) -> None:
    notified = _lifecycle().notified
    for _ in range(2):
        notified.watch("signals", polls_clouds=True)
    assert len(watchers) == 1
    notified.close()
    notified.close()
    assert watchers[0].closed

    notified.watch("signals", polls_clouds=True)

    assert [one.closed for one in watchers] == [True, False]


def test_an_unknown_source_of_notices_is_refused() -> None:
    with raises_message(ConfigError):
        _lifecycle().watch("skynet")


def test_invalid_stored_profiles_are_not_recalled() -> None:
    leader = _leader()
    lifecycle = _lifecycle(leader=leader)
    leader.form(FleetFormed(0, 0, 12, (Worker("h/0"), Worker("h/1"))))
    for junk in ({}, {"profiles": [{}, 3, {"curve": [1]}], "generation": "x"}, {"profiles": 7}):
        plain = lifecycle.recalling(0, dict(junk))()
        assert plain["verdict"]["shares"] is None
    assert leader.control.generation == 1
    assert lifecycle.remember()["profiles"] == []
    assert lifecycle.remember()["parting"] is False


def _known(slot: int) -> WorkerProfile:
    return WorkerProfile(
        "h", "cpu x", slot, f"h/{slot}", (0.1, 0.01 + slot, 0.0, 0.0, 0.0), 0.01, 7
    )


def _formed() -> tuple[RunLifecycle, Leader]:
    leader = _leader()
    workers = tuple(Worker(f"h/{k}", device="cpu x", slot=k) for k in range(2))
    leader.form(FleetFormed(0, 0, 12, workers))
    return _lifecycle(leader=leader), leader


def test_what_can_be_read_of_workers_is_recalled_and_remembered_again() -> None:
    lifecycle, _ = _formed()
    profiles = [{"curve": 3}, *(_known(slot).to_plain() for slot in range(3))]

    plain = lifecycle.recalling(0, {"profiles": profiles, "generation": 4})()
    begun: list[Any] = []
    gate: Any = SimpleNamespace(begin_with=begun.append)
    shares = lifecycle.take_up(plain, gate)

    assert shares is not None
    assert shares[0] > shares[1] > 0
    assert begun == [shares]
    remembered = lifecycle.remember()
    assert remembered["generation"] == 5
    assert sorted(one["slot"] for one in remembered["profiles"]) == [0, 1, 2]


def test_measured_profiles_are_stored() -> None:
    lifecycle, leader = _formed()
    shares = leader.control.shares
    seen = [Observation(k, shares[k], 1, (0.1 * (k + 1),), (0.0,)) for k in range(2)]

    leader.exchange(2, [Reply(3, 5, ((0, 0, 0),), Measurements.of([one])) for one in seen], 5)

    assert [one["slot"] for one in lifecycle.remember()["profiles"]] == [0, 1]


def test_a_split_that_stays_is_not_put_in_force_again() -> None:
    lifecycle, _ = _formed()
    plain = lifecycle.recalling(0, {})()
    begun: list[Any] = []
    assert lifecycle.take_up(plain, cast(Any, SimpleNamespace(begin_with=begun.append))) is None
    assert not begun


@pytest.mark.parametrize(("parting", "failures"), [(False, 3), (True, 2), (None, 3)])
def test_a_life_that_did_not_end_as_announced_is_counted_as_lost(
    parting: bool | None, failures: int
) -> None:
    lifecycle, _ = _formed()
    losses = {"failures": 2, "expected": 0.5}
    said = {} if parting is None else {"parting": parting}

    lifecycle.recalling(0, {"losses": losses, **said})()

    assert lifecycle.remember()["losses"]["failures"] == failures


def test_a_departure_that_is_agreed_on_is_remembered_as_announced() -> None:
    lifecycle, leader = _formed()
    assert leader.saves is lifecycle.saves
    lifecycle.saves.agreed(3, save=True, going=(1,), why="spot")

    assert lifecycle.remember()["parting"] is True


class _Stride:
    """A stride that notes that it was closed."""

    def __init__(self) -> None:
        self.step, self.closed = 7, False

    def close(self) -> None:
        self.closed = True


def _part(rank: int, monkeypatch: pytest.MonkeyPatch, *, leads: bool = False) -> list[Any]:
    stride: Any = _Stride()
    ended: list[Any] = []
    monkeypatch.setattr(endings, "end_launcher", lambda: ended.append("launcher"))
    with pytest.raises((SystemExit, WorkerLost)) as raised:
        endings.part(stride.close, stride.step, rank, (1,), "spot", leads_host=leads)
    assert stride.closed
    return [raised.value, *ended]


def test_a_leaving_rank_ends_with_143_and_the_others_log_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (leaver,) = _part(1, monkeypatch)
    assert isinstance(leaver, SystemExit)
    assert leaver.code == LEFT == 143
    _, launcher = _part(1, monkeypatch, leads=True)
    assert launcher == "launcher"
    (other,) = _part(0, monkeypatch)
    assert isinstance(other, WorkerLost)
    check_message(str(other), "rank 1", "step 7")


@pytest.mark.parametrize(
    ("command", "elastic", "signalled"),
    [
        (b"python\0-m\0torch.distributed.run\0train.py", True, True),
        (b"python\0-m\0evenstride.lab.processes.rendezvous\0train.py", True, True),
        (b"/venv/bin/torchrun\0train.py", True, True),
        (b"python\0/lib/torch/distributed/run.py\0train.py", True, True),
        (b"python\0-m\0torch.distributed.run\0train.py", False, False),
        (b"bash", True, False),
        (None, True, False),
    ],
)
def test_only_an_agent_of_torchrun_gets_a_signal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: bytes | None,
    elastic: bool,
    signalled: bool,
) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *signal_: killed.append(signal_))
    monkeypatch.setattr(os, "getppid", lambda: 4321)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if elastic:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    if command is not None:
        (tmp_path / "4321").mkdir()
        (tmp_path / "4321" / "cmdline").write_bytes(command)
    torchrun_agent.end_launcher(tmp_path)
    assert killed == ([(4321, signal.SIGTERM)] if signalled else [])
