"""Synchronisation modes: what their texts mean, what is refused, and their drawbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError

import pytest

from evenstride.core.sync_modes.mode_specs import (
    SYNC_NAMES,
    AllReduce,
    Asynchronous,
    DelayedMode,
    LocalSgd,
    ParameterServerMode,
    StaleSynchronous,
    SyncMode,
    rate_factor,
    sync_from_spec,
)
from evenstride.errors import ConfigError
from tests.messages import check_message, raises_message

ALL: tuple[SyncMode, ...] = (
    AllReduce(),
    ParameterServerMode(),
    Asynchronous(),
    StaleSynchronous(),
    LocalSgd(every=8),
    DelayedMode(),
)


def refusal(spec: str) -> str:
    with pytest.raises(ConfigError) as refused:
        sync_from_spec(spec)
    return str(refused.value)


@pytest.mark.parametrize(
    ("spec", "mode", "canonical"),
    [
        ("bsp", AllReduce(), "bsp"),
        ("bsp()", AllReduce(), "bsp"),
        ("bsp-ps", ParameterServerMode(), "bsp-ps"),
        ("bsp-ps:servers=2", ParameterServerMode(2), "bsp-ps(servers=2)"),
        ("asp", Asynchronous(), "asp"),
        ("asp:servers=2,rate=staleness", Asynchronous(2, "staleness"), None),
        ("ssp", StaleSynchronous(), "ssp"),
        ("ssp(staleness=3)", StaleSynchronous(3), "ssp"),
        ("ssp:staleness=0", StaleSynchronous(0), "ssp(staleness=0)"),
        (" ssp( staleness = 2 , servers=2 ) ", StaleSynchronous(2, 2), None),
        ("local-sgd(every=8)", LocalSgd(8), "local-sgd(every=8)"),
        (
            "local-sgd:every=8,after=100,outer_rate=0.7,outer_momentum=0.9",
            LocalSgd(8, 100, 0.7, 0.9),
            "local-sgd(every=8,after=100,outer_rate=0.7,outer_momentum=0.9)",
        ),
        ("delayed", DelayedMode(), "delayed"),
    ],
)
def test_a_text_names_a_mode_and_a_mode_its_text(
    spec: str, mode: SyncMode, canonical: str | None
) -> None:
    read = sync_from_spec(spec)

    assert read == mode
    assert type(read) is type(mode)
    assert canonical in (None, str(read))


def test_every_mode_is_found_by_its_name() -> None:
    assert [mode.name for mode in ALL] == list(SYNC_NAMES)
    assert SYNC_NAMES == ("bsp", "bsp-ps", "asp", "ssp", "local-sgd", "delayed")


def test_an_unknown_mode_is_refused_with_the_nearest_and_all_modes() -> None:
    check_message(refusal("delay"), "'delay'")
    assert "did you mean ssp?" in refusal("SSP(staleness=3)")
    for spec in ("", "servers=2", "(servers=2)", "fair(x=1"):
        check_message(refusal(spec), f"{spec!r}")


@pytest.mark.parametrize(
    ("spec", "at"),
    [
        ("asp(staleness=3)", "staleness=3"),
        ("asp(2)", "2"),
        ("asp(servers)", "servers"),
        ("asp(servers=2", "(servers=2"),
        ("asp(servers=2)x", "(servers=2)x"),
        ("asp(servers=2)(rate=constant)", "servers=2)(rate=constant"),
        ("asp:(servers=2)", "(servers=2)"),
    ],
)
def test_an_invalid_setting_is_refused_with_the_available_ones(spec: str, at: str) -> None:
    if at == "servers=2)(rate=constant":  # reads as one value, which is no number
        assert "servers is '2)(rate=constant'" in refusal(spec)
        return
    check_message(refusal(spec), f"{spec!r}", f"{at!r}")


def test_a_mode_without_settings_says_so() -> None:
    check_message(refusal("bsp:servers=2"), "'bsp:servers=2'", "'servers=2'")


def test_a_setting_given_twice_is_refused() -> None:
    assert "sets servers twice" in refusal("asp(servers=1,servers=2)")


def test_local_sgd_without_its_interval_is_refused_with_the_remedy() -> None:
    reported = (
        "sync local-sgd: every is not set, but must be an integer, at least 1; write "
        "local-sgd(every=8), or bsp to synchronise the workers in every step"
    )
    assert refusal("local-sgd") == reported
    assert refusal("local-sgd(after=3)") == reported


@pytest.mark.parametrize(
    ("spec", "value", "way_out"),
    [
        ("ssp(staleness=-1)", "-1", ()),
        ("ssp(staleness=1.5)", "'1.5'", ()),
        ("ssp(servers=0)", "0", ()),
        ("bsp-ps(servers=0)", "0", ()),
        ("asp(servers=many)", "'many'", ()),
        ("asp(rate=fast)", "'fast'", ()),
        ("local-sgd(every=0)", "0", ()),
        ("local-sgd(every=8,after=-1)", "-1", ()),
        (
            "local-sgd(every=8,outer_rate=0)",
            "0.0",
            ("1.0",),
        ),
        (
            "local-sgd(every=8,outer_momentum=1)",
            "1.0",
            ("0.0",),
        ),
        (
            "local-sgd(every=8,outer_momentum=-0.1)",
            "-0.1",
            ("0.0",),
        ),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_range(
    spec: str, value: str, way_out: tuple[str, ...]
) -> None:
    mode, name = spec.split("(")[0], spec.rpartition("=")[0].replace("(", ",").rpartition(",")[2]

    check_message(refusal(spec), mode, name, value, *way_out)


@pytest.mark.parametrize(
    "make",
    [
        lambda: StaleSynchronous(staleness=True),
        lambda: StaleSynchronous(staleness=2.0),  # type: ignore[arg-type]
        lambda: ParameterServerMode(servers="2"),  # type: ignore[arg-type]
        lambda: Asynchronous(rate=1),  # type: ignore[arg-type]
        lambda: ParameterServerMode(servers=-(10**400)),  # no float holds it
        lambda: LocalSgd(every=8, outer_rate=float("inf")),
        lambda: LocalSgd(every=8, outer_rate=float("nan")),
    ],
)
def test_values_are_refused_however_they_are_given(make: Callable[[], SyncMode]) -> None:
    with raises_message(ConfigError):
        make()


def test_a_mode_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        ParameterServerMode().servers = 2  # type: ignore[misc]


def test_modes_know_whether_they_keep_step_and_have_servers() -> None:
    assert {mode.name for mode in ALL if not mode.lockstep} == {"asp", "ssp"}
    assert {mode.name: mode.servers for mode in ALL} == {
        "bsp": 0,
        "bsp-ps": 1,
        "asp": 1,
        "ssp": 1,
        "local-sgd": 0,
        "delayed": 0,
    }


def test_the_drawbacks_of_a_mode_are_whole_sentences() -> None:
    assert {mode.name for mode in ALL if not mode.forgoes} == {"bsp"}
    for sentence in (
        sentence for mode in (*ALL, LocalSgd(8, after=5)) for sentence in mode.forgoes
    ):
        assert sentence[0].isupper()
        assert sentence.endswith(".")


def test_staleness_is_bounded_only_where_it_is() -> None:
    assert "clipping" in ParameterServerMode().forgoes[0]
    assert Asynchronous().forgoes[:2] == StaleSynchronous().forgoes[:2]
    check_message(Asynchronous().forgoes[2])
    assert "at most 3 updates ahead" in StaleSynchronous().forgoes[2]
    check_message(StaleSynchronous().forgoes[2])


def test_local_sgd_tells_what_its_settings_forgo() -> None:
    assert "every 8 steps" in LocalSgd(8).forgoes[1]
    check_message(LocalSgd(8, after=5).forgoes[1], "step 5")
    assert "only with plain SGD" in LocalSgd(1).forgoes[0]
    for outer in (LocalSgd(1, outer_rate=0.5), LocalSgd(1, outer_momentum=0.9)):
        check_message(outer.forgoes)


def test_the_step_size_follows_staleness_if_asked_to() -> None:
    assert [rate_factor("constant", n) for n in (0, 1, 5)] == [1.0, 1.0, 1.0]
    assert [rate_factor("staleness", n) for n in (0, 1, 2, 5)] == [1.0, 1.0, 0.5, 0.2]
