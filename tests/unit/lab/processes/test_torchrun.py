"""The torchrun command, setting by setting."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evenstride.errors import ConfigError
from evenstride.lab.processes import torchrun
from evenstride.lab.processes.torchrun import (
    Offers,
    Request,
    StoreEndpoint,
    Torchrun,
    offers_of_torch,
)
from tests.messages import check_message, raises_message

HEAD = StoreEndpoint("head", 29400)


def command_of(**fields: Any) -> Torchrun:
    """Return the command of a request."""
    offers = fields.pop("offers", None)
    return torchrun.torchrun(Request(**{"command": ("train.py", "--lr", "1"), **fields}), offers)


def settings_of(run: Torchrun) -> dict[str, str]:
    """Return the rendezvous settings."""
    (argument,) = (a for a in run.arguments if a.startswith("--rdzv-conf="))
    return dict(pair.split("=") for pair in argument.removeprefix("--rdzv-conf=").split(","))


def test_one_machine_needs_no_store() -> None:
    run = command_of(per_node="2")

    assert run.arguments[:3] == (
        "--nnodes=1",
        "--nproc-per-node=2",
        "--max-restarts=3",
    )
    assert run.arguments[-3:] == ("train.py", "--lr", "1")
    assert not run.notes


def test_machines_that_may_be_taken_away_meet_as_clients_of_a_store_apart() -> None:
    run = command_of(nodes=(1, 4), store=HEAD, spot=True, name="mine")

    assert {
        "--nnodes=1:4",
        "--rdzv-endpoint=head:29400",
        "--rdzv-id=mine",
        "--nproc-per-node=auto",
        "--max-restarts=1000",
        "--shutdown-timeout=20",
    } < set(run.arguments)
    settings = settings_of(run)
    assert settings["is_host"] == "0"
    assert (settings["last_call_timeout"], settings["join_timeout"]) == ("3", "3600")
    assert (settings["keep_alive_interval"], settings["keep_alive_max_attempt"]) == ("1", "5")
    check_message(run.notes[0], "29400", "--store-only")


def test_machines_that_stay_host_the_store_among_them_and_hear_what_that_means() -> None:
    run = command_of(nodes=(2, 2), store=HEAD)

    settings = settings_of(run)
    assert "is_host" not in settings
    assert settings["join_timeout"] == "600"
    assert "--max-restarts=3" in run.arguments
    assert not any(a.startswith("--shutdown-timeout") for a in run.arguments)
    (note,) = run.notes
    check_message(note)
    assert "the job ends on all machines" in note
    assert "evenstride launch --store-only --store head:29400" in note


def test_one_machine_that_may_be_taken_away_takes_the_job_along() -> None:
    note, _ = command_of(spot=True).notes

    check_message(note)


def test_a_failure_that_stays_is_met_at_each_of_many_restarts_and_that_is_said() -> None:
    *_, note = command_of(spot=True, nodes=(1, 4), store=HEAD).notes

    assert "at each of the 1000 restarts" in note
    check_message(note, "--restarts 3", "--spot")
    assert "at each of the 40 restarts" in command_of(spot=True, restarts=40).notes[-1]
    for few in (command_of(spot=True, restarts=3), command_of()):
        assert not any("restarts" in note for note in few.notes)


def test_several_machines_without_a_store_are_refused_with_both_ways_out() -> None:
    with raises_message(ConfigError, "--store-only", "--spot"):
        command_of(nodes=(1, 4), spot=True)


def test_signals_of_batch_systems_reach_the_workers() -> None:
    (argument,) = (a for a in command_of().arguments if a.startswith("--signals-to-handle="))

    heard = {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"}
    assert set(argument.partition("=")[2].split(",")) == heard


def test_a_torchrun_that_knows_less_is_asked_for_less_and_that_is_said() -> None:
    older = Offers(shutdown=False, signals=False, keep_alive=False)
    run = command_of(nodes=(1, 4), store=HEAD, spot=True, offers=older)

    assert not any("--signals" in a or "--shutdown" in a for a in run.arguments)
    assert not any("keep_alive" in key for key in settings_of(run))
    check_message(run.notes[-1], "15 s")


def test_a_keep_alive_matters_only_where_machines_meet() -> None:
    assert not command_of(offers=Offers(keep_alive=False)).notes


def test_one_machine_meets_others_later_if_it_has_a_store() -> None:
    run = command_of(store=HEAD, spot=True)

    assert {"--nnodes=1:1", "--rdzv-endpoint=head:29400"} < set(run.arguments)
    check_message(run.notes[0], "29400")


@pytest.mark.parametrize("spot", [False, True])
def test_a_request_to_the_store_may_take_a_minute(spot: bool) -> None:
    assert settings_of(command_of(nodes=(1, 4), store=HEAD, spot=spot))["read_timeout"] == "60"


def test_a_store_at_a_number_of_the_newer_kind_is_written_in_brackets() -> None:
    run = command_of(nodes=(1, 4), store=StoreEndpoint("fd00::1", 29400))

    assert "--rdzv-endpoint=[fd00::1]:29400" in run.arguments


def test_a_missing_or_unreadable_torch_is_not_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert offers_of_torch() == Offers()

    elsewhere = SimpleNamespace(locate_file=lambda path: tmp_path / path)
    monkeypatch.setattr(metadata, "distribution", lambda _: elsewhere)
    assert offers_of_torch() == Offers(False, False, False)


def test_restarts_and_address_can_be_given() -> None:
    run = command_of(spot=True, restarts=0, address="10.0.0.7", store=HEAD)

    assert "--max-restarts=0" in run.arguments
    assert "--local-addr=10.0.0.7" in run.arguments


def test_an_address_on_one_machine_is_not_used_and_a_note_says_so() -> None:
    run = command_of(address="10.0.0.7")

    assert not any(a.startswith("--local-addr") for a in run.arguments)
    check_message(run.notes, "--address 10.0.0.7")


def test_the_installed_torchrun_takes_the_command() -> None:
    from torch.distributed.run import get_args_parser

    offers = offers_of_torch()
    run = command_of(nodes=(1, 4), store=HEAD, spot=True, address="10.0.0.7", offers=offers)
    parsed = get_args_parser().parse_args(list(run.arguments))

    assert parsed.nnodes == "1:4"
    assert parsed.training_script == "train.py"
    assert parsed.training_script_args == ["--lr", "1"]
    assert hasattr(parsed, "shutdown_timeout") is offers.shutdown
    assert hasattr(parsed, "signals_to_handle") is offers.signals


def test_all_settings_reach_the_rendezvous_of_the_installed_torch() -> None:
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    offers = offers_of_torch()
    settings = settings_of(command_of(nodes=(1, 4), store=HEAD, spot=True, offers=offers))
    store = HashStore()
    parameters = RendezvousParameters("c10d", "head", "mine", 1, 4, None, **settings)
    made = create_handler(store, C10dRendezvousBackend(store, "mine"), parameters).settings

    assert made.timeout.last_call.total_seconds() == 3
    assert made.timeout.join.total_seconds() == 3600
    if offers.keep_alive:
        assert made.keep_alive_interval.total_seconds() * made.keep_alive_max_attempt == 5


@pytest.mark.parametrize(
    ("text", "nodes"), [("1", (1, 1)), ("4", (4, 4)), ("1:4", (1, 4)), (" 2:2 ", (2, 2))]
)
def test_nodes_are_understood(text: str, nodes: tuple[int, int]) -> None:
    assert torchrun.parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["", "0", "4:1", "1:", ":4", "a", "1:2:3", "-1", "0:4", "1.5"])
def test_nodes_that_cannot_be_are_refused(text: str) -> None:
    with raises_message(ConfigError):
        torchrun.parse_nodes(text)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("head", "head", 29400),
        ("head:29500", "head", 29500),
        ("10.0.0.5:1", "10.0.0.5", 1),
        ("[fd00::1]", "fd00::1", 29400),
        ("[fd00::1]:65535", "fd00::1", 65535),
    ],
)
def test_a_store_is_understood(text: str, host: str, port: int) -> None:
    endpoint = torchrun.parse_store(text)

    assert endpoint == StoreEndpoint(host, port)
    assert torchrun.parse_store(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":1",
        "head:",
        "head:0",
        "head:65536",
        "head:x",
        "fd00::1",
        "a/b",
        "a b",
        "a:1:2",
        "u@h:1",
    ],
)
def test_a_store_that_cannot_be_is_refused(text: str) -> None:
    with raises_message(ConfigError):
        torchrun.parse_store(text)


@pytest.mark.parametrize(
    "text", ["0.0.0.0", "0.0.0.0:1", "0", "0x0:1", "[::]", "[::]:1", "[::%1]", "[::ffff:0.0.0.0]"]
)
def test_a_store_at_every_address_of_a_machine_is_refused(text: str) -> None:
    with raises_message(ConfigError):
        torchrun.parse_store(text)


@pytest.mark.parametrize("text", ["127.0.0.1", "[::1]", "10", "localhost", "node_1.local", "köln"])
def test_one_address_or_a_name_is_no_such_thing(text: str) -> None:
    assert str(torchrun.parse_store(text)) == f"{text}:29400"


@pytest.mark.parametrize("text", ["1", "8", "auto", "gpu", "cpu"])
def test_workers_per_machine_are_understood(text: str) -> None:
    assert torchrun.parse_per_node(text) == text


@pytest.mark.parametrize("text", ["", "0", "-1", "two", "1.5", "²"])
def test_workers_per_machine_that_cannot_be_are_refused(text: str) -> None:
    with raises_message(ConfigError):
        torchrun.parse_per_node(text)
