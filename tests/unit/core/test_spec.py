"""The grammar of specifications, and the policies that are found by it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from evenstride.core.policies import policy_from_spec, spec_of
from evenstride.core.policies.dbs import Dbs
from evenstride.core.policies.dynamic_batching import OmniLearn
from evenstride.core.policies.lb_bsp import LbBspCpu, LbBspGpu
from evenstride.core.policy import Policy
from evenstride.core.spec import (
    Spec,
    check_settings,
    duration_s,
    one_of,
    parse_spec,
    settings_in,
    spec_text,
    split_specs,
    within,
)
from evenstride.errors import ConfigError, UnknownPolicy
from tests.messages import check_message, raises_message


@dataclass(frozen=True)
class Made:
    count: int = field(default=3, metadata=within(int, 1, 9, example=2))
    part: float = field(default=0.5, metadata=within(float, 0, 1, above=True, below=True))
    kind: str = field(default="plain", metadata=one_of("plain", "fancy", "odd"))

    def __post_init__(self) -> None:
        check_settings("thing made", self)


@dataclass(frozen=True)
class Required:
    every: int = field(metadata=within(int, instead="write made(every=2)"))


def made(text: str) -> Made:
    return Made(**settings_in(parse_spec(text), "thing", Made, "{}({})"))


@pytest.mark.parametrize(
    ("text", "name", "argument"),
    [
        ("bsp", "bsp", None),
        ("", "", None),
        ("csv:", "csv", ""),
        ("bsp()", "bsp", ""),
        (" ssp ( a = 1, b=2 ) ", "ssp", " a = 1, b=2 "),
        ("ssp:a=1", "ssp", "a=1"),
        ("SIGUSR1@120", "SIGUSR1@120", None),
        ("adaptive@min_gain=0.1", "adaptive@min_gain=0.1", None),
        ("ssp@2(a=1)", "ssp@2", "a=1"),
        ("csv:folder (1)/a@b.csv", "csv", "folder (1)/a@b.csv"),
        ("prometheus:[::1]:9108", "prometheus", "[::1]:9108"),
        ("ssp(a=1", "ssp", "(a=1"),
        ("ssp(a=1)x", "ssp", "(a=1)x"),
    ],
)
def test_a_text_has_a_name_and_an_argument(text: str, name: str, argument: str | None) -> None:
    assert parse_spec(text) == Spec(text, name, argument)


def test_other_separators_count_where_they_are_asked_for() -> None:
    assert parse_spec("SIGUSR1@2m", separators=":@") == Spec("SIGUSR1@2m", "SIGUSR1", "2m")
    assert parse_spec("csv:a@b", separators=":@") == Spec("csv:a@b", "csv", "a@b")


@pytest.mark.parametrize("text", ["adaptive@min_gain=0.1", "uniform@1"])
def test_a_policy_has_no_settings_after_an_at_sign(text: str) -> None:
    with pytest.raises(UnknownPolicy):
        policy_from_spec(text)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("", Made()),
        ("kind=fancy", Made(kind="fancy")),
        (" count = 7 ,, part=.25", Made(7, 0.25)),
    ],
)
def test_a_setting_has_the_type_of_its_field_in_every_form(argument: str, expected: Made) -> None:
    assert made(f"made:{argument}") == made(f"made({argument})") == expected
    assert made(spec_text("made", expected, "{}:{}")) == expected
    assert made(spec_text("made", expected, "{}({})")) == expected


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ("count=1.5", ("'1.5'",)),
        ("count=10", ("10",)),
        ("part=nan", ()),
        ("part=inf", ()),
        ("kind=other", ("'other'",)),
    ],
)
def test_a_value_that_cannot_be_is_refused(argument: str, complaint: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        made(f"made:{argument}")

    check_message(str(caught.value), *complaint)


@pytest.mark.parametrize("argument", ["other=1", "7", "count", "=3"])
def test_an_unknown_setting_is_refused_with_the_available_ones(argument: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(f"made:{argument}")

    check_message(str(caught.value), argument)


def test_a_setting_that_is_given_twice_or_not_at_all_is_refused() -> None:
    with raises_message(ConfigError):
        made("made:count=7,count=8")
    with raises_message(ConfigError):
        settings_in(parse_spec("made"), "thing", Required, "{}({})")


@pytest.mark.parametrize(
    ("texts", "specs"),
    [
        ("", ()),
        (" , ", ()),
        ("a,,b, ", ("a", "b")),
        ("a, b(x=2, y=2) ,a", ("a", "b(x=2, y=2)", "a")),
        ("a,b(x=2,y=2),a:x=2, y=1", ("a", "b(x=2,y=2)", "a:x=2,y=1")),
        ("a:x=2, y=3,b:x=1,a(y=8,x=2)", ("a:x=2,y=3", "b:x=1", "a(y=8,x=2)")),
        ("a:1,2,b", ("a:1,2", "b")),
        ("b(x=2),x=2", ("b(x=2)", "x=2")),
        (["a:1", "2,b"], ("a:1", "2", "b")),
    ],
)
def test_a_list_is_split_where_a_specification_ends(
    texts: str | list[str], specs: tuple[str, ...]
) -> None:
    assert split_specs(texts, ("a", "b")) == specs


@pytest.mark.parametrize(
    ("text", "unit", "seconds"),
    [
        ("90s", "", 90.0),
        (" 5 min ", "", 300.0),
        (".5h", "", 1800.0),
        ("2d", "", 172800.0),
        ("1.5", "h", 5400.0),
        ("0s", "", 0.0),
        ("7", "", None),
        ("6 weeks", "s", None),
        ("-1h", "h", None),
        ("1h30m", "h", None),
    ],
)
def test_a_length_of_time_has_a_unit(text: str, unit: str, seconds: float | None) -> None:
    assert duration_s(text, unit) == seconds


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ("dbs:epoch_steps=50", Dbs(epoch_steps=50)),
        ("lb-bsp-cpu:predictor=ema", LbBspCpu(predictor="ema")),
        ("lb-bsp-gpu:version=2018", LbBspGpu(version=2018)),
        ("omnilearn:dead_band=0.1,b_min=4", OmniLearn(dead_band=0.1, b_min=4)),
    ],
)
def test_published_policies_are_found_by_name(spec: str, policy: Policy[object]) -> None:
    assert policy_from_spec(spec) == policy


@dataclass(frozen=True)
class OwnPolicy:
    step: int = 1
    name: str = ""
    opening_steps: int = 0

    def init(self, fleet: object) -> object: ...

    def decide(self, state: object, situation: object) -> object: ...


OWN = f"{__name__}.OwnPolicy"


def test_a_policy_of_ones_own_is_imported_with_its_settings() -> None:
    names = split_specs(f"dbs:epoch_steps=5,{OWN}:step=4,name=fair,uniform", ("dbs", "uniform"))

    assert names == ("dbs:epoch_steps=5", f"{OWN}:step=4,name=fair", "uniform")
    plain, policy = policy_from_spec(OWN), policy_from_spec(names[1])
    assert repr(plain) == repr(OwnPolicy())
    assert repr(policy) == repr(OwnPolicy(step=4, name="fair"))
    assert policy_from_spec(spec_of(policy)) == policy


def test_a_trace_does_not_choose_what_is_imported() -> None:
    with pytest.raises(UnknownPolicy):
        policy_from_spec(OWN, imported=False)


@pytest.mark.parametrize(
    ("spec", "fact"),
    [
        (f"{__name__}.Other", "Other"),
        ("not_there.Own", "not_there"),
        (f"{OWN}:stop=4", "stop"),
        (f"{OWN}:4", "'4'"),
        ("json.JSONDecoder", "opening_steps"),
    ],
)
def test_what_is_no_policy_of_ones_own_is_refused(spec: str, fact: str) -> None:
    with raises_message(ConfigError, fact):
        policy_from_spec(spec)


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with raises_message(UnknownPolicy, "'adaptve:min_gain=1'"):
        policy_from_spec("adaptve:min_gain=1")
    with raises_message(UnknownPolicy, "'fair'"):
        policy_from_spec("fair")
