"""What outlives a process: notices on their way, what is known of workers, and how a rank ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from evenstride.core.events import FleetFormed
from evenstride.core.fleet import Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.state import Control
from evenstride.errors import ConfigError, WorkerLost
from evenstride.runtime.checkpoint import parting
from evenstride.runtime.continuity import LEFT, Continuity
from evenstride.runtime.leader import Leader
from evenstride.runtime.notices import Notice
from evenstride.runtime.peers import Peer

PEERS = tuple(Peer(k, "h", "one" if k < 2 else "two", 100 + k) for k in range(3))


def _continuity(
    rank: int = 0, *, over: bool = False, asked: list[bool] | None = None
) -> Continuity:
    leader = Leader(Control(policy_from_spec("adaptive"))) if rank == 0 else None
    tell = (lambda: asked.append(True)) if asked is not None else (lambda: None)
    return Continuity(tell, rank, PEERS, leader, lambda: over)


def _notice(left_s: float | None = 60.0, *, whole_host: bool = False) -> Notice:
    at_s = None if left_s is None else time.time() + left_s
    return Notice("SIGTERM", at_s, whole_host, not whole_host, "a test")


def test_a_notice_asks_for_an_exchange_and_is_told_with_the_time_that_is_left() -> None:
    asked: list[bool] = []
    notified = _continuity(asked=asked).notified
    assert notified.told() is None
    notified.changed(_notice())
    told = notified.told()
    assert told is not None
    assert told.left_s == pytest.approx(60.0, abs=5.0)
    assert (told.whole_host, told.final, told.why) == (False, False, "a test")
    notified.changed(_notice(None, whole_host=True))
    told = notified.told()
    assert told is not None
    assert (told.left_s, told.final) == (None, True)
    notified.changed(None)
    assert notified.told() is None
    assert len(asked) == 3


def test_a_signal_ends_a_process_whose_run_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    _continuity(over=True).notified.changed(_notice(whole_host=True))
    assert not codes, "a machine that goes later is no reason to end at once"
    _continuity(over=False).notified.changed(_notice())
    assert not codes
    _continuity(over=True).notified.changed(_notice())
    assert codes == [LEFT]


def test_the_first_rank_of_a_machine_that_goes_speaks_for_it() -> None:
    def leads(rank: int, going: tuple[int, ...], *, whole_host: bool = True) -> bool:
        continuity = _continuity(rank)
        assert not continuity.leads_host(going), "nobody has said that it goes"
        continuity.notified.changed(_notice(whole_host=whole_host))
        return continuity.leads_host(going)

    assert leads(0, (0, 1))
    assert not leads(1, (0, 1))
    assert not leads(0, (0,)), "the other one stays"
    assert leads(2, (2,))
    assert not leads(2, (2,), whole_host=False), "who starts it again sends signals, too"


def test_an_unknown_source_of_notices_is_refused() -> None:
    with pytest.raises(ConfigError, match="skynet"):
        _continuity().watch("skynet")


def test_what_is_no_memory_of_workers_recalls_nothing() -> None:
    continuity = _continuity()
    leader = continuity._leader
    assert leader is not None
    leader.form(FleetFormed(0, 0, 12, (Worker("h/0"), Worker("h/1"))))
    for junk in ({}, {"profiles": [{}, 3, {"curve": [1]}], "generation": "x"}, {"profiles": 7}):
        plain = continuity.recalling(0, dict(junk))()
        assert plain["verdict"]["shares"] is None
    assert leader.control.generation == 1
    assert continuity.remember()["profiles"] == []
    assert continuity.remember()["parting"] is False


class _Stride:
    """A stride that notes that it was closed."""

    def __init__(self) -> None:
        self.step, self.closed = 7, False

    def close(self) -> None:
        self.closed = True


def _part(rank: int, monkeypatch: pytest.MonkeyPatch, *, leads: bool = False) -> list[Any]:
    stride: Any = _Stride()
    ended: list[Any] = []
    monkeypatch.setattr(parting, "end_launcher", lambda: ended.append("launcher"))
    with pytest.raises((SystemExit, WorkerLost)) as raised:
        parting.part(stride, rank, (1,), "spot", leads_host=leads)
    assert stride.closed
    return [raised.value, *ended]


def test_who_leaves_ends_with_143_and_the_others_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (leaver,) = _part(1, monkeypatch)
    assert isinstance(leaver, SystemExit)
    assert leaver.code == LEFT == 143
    _, launcher = _part(1, monkeypatch, leads=True)
    assert launcher == "launcher"
    (other,) = _part(0, monkeypatch)
    assert isinstance(other, WorkerLost)
    assert "rank 1 has left as announced after step 7 (spot); start again" in str(other)


@pytest.mark.parametrize(
    ("command", "elastic", "told"),
    [
        (b"python\0-m\0torch.distributed.run\0train.py", True, True),
        (b"/venv/bin/torchrun\0train.py", True, True),
        (b"python\0-m\0torch.distributed.run\0train.py", False, False),
        (b"bash", True, False),
        (None, True, False),
    ],
)
def test_only_an_agent_of_torchrun_is_told_to_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: bytes | None,
    elastic: bool,
    told: bool,
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
    parting.end_launcher(tmp_path)
    assert killed == ([(4321, signal.SIGTERM)] if told else [])
