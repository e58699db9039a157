"""Settings of every type are read from a policy's specification."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from evenstride.core.policies import _settings, policy_from_spec
from evenstride.core.policies.dbs import Dbs
from evenstride.core.policies.lb_bsp_cpu import LbBspCpu
from evenstride.core.policies.lb_bsp_gpu import LbBspGpu
from evenstride.core.policies.omnilearn import OmniLearn
from evenstride.core.policy import Policy
from evenstride.errors import ConfigError, UnknownPolicy


@dataclass(frozen=True)
class Settings:
    flag: bool = False
    count: int = 3
    part: float = 0.5
    kind: str = "plain"


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("", {}),
        ("flag=true", {"flag": True}),
        ("flag=false,kind=fancy", {"flag": False, "kind": "fancy"}),
        ("count=7,part=2", {"count": 7, "part": 2.0}),
    ],
)
def test_a_value_is_read_as_the_type_of_its_default(
    argument: str, values: dict[str, object]
) -> None:
    read = _settings(f"policy:{argument}", Settings, argument)

    assert read == values
    assert {type(value) for value in read.values()} == {type(value) for value in values.values()}


@pytest.mark.parametrize("argument", ["flag=1", "count=1.5", "part=nan", "part=inf", "other=1"])
def test_a_value_of_another_type_is_refused(argument: str) -> None:
    name = argument.partition("=")[0]
    kinds = {"flag": "true or false", "count": "a whole number", "part": "a finite number"}
    what = rf" \({name} is {kinds[name]}\)" if name in kinds else ""
    with pytest.raises(ConfigError, match=f"at '{argument}'{what}; its settings are: flag=False"):
        _settings(f"policy:{argument}", Settings, argument)


def test_a_setting_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="sets count twice"):
        _settings("policy:count=7,count=8", Settings, "count=7,count=8")


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


def test_an_unknown_policy_is_told_with_the_nearest_name() -> None:
    with pytest.raises(
        UnknownPolicy, match=r"'adaptve:min_gain=1' \(did you mean adaptive\?\); the"
    ):
        policy_from_spec("adaptve:min_gain=1")
    with pytest.raises(UnknownPolicy, match="unknown policy 'fair'; the policies are"):
        policy_from_spec("fair")
