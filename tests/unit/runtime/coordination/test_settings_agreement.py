"""Settings that ranks show in `Stride()` and that turn out to be wrong when a model is watched."""

from __future__ import annotations

import pytest

from evenstride.core.policies import policy_from_spec
from evenstride.errors import ConfigError
from evenstride.runtime.coordination.settings_agreement import check_declared
from tests.messages import raises_message


@pytest.mark.parametrize("policy", ["static", "dynamic-batching"])
@pytest.mark.parametrize(("assumed", "kind"), [("cpu", "xpu"), ("xpu", "cpu")])
def test_speeds_of_another_type_of_device_are_refused(policy: str, assumed: str, kind: str) -> None:
    with raises_message(ConfigError, "rank 1", f"on {kind}", "torch.xpu.set_device"):
        check_declared(policy_from_spec(policy), ["xpu", assumed], ["xpu", kind])


@pytest.mark.parametrize(
    ("policy", "assumed", "kinds"),
    [
        ("static", ["cuda", "cpu"], ["cuda", "cpu"]),
        ("static:cores", ["cpu", "cpu"], ["cuda", "cuda"]),
        ("adaptive", ["cpu", "cpu"], ["cuda", "cpu"]),
        ("static", ["cuda"], ["cpu"]),  # alone, a rank has all samples
    ],
)
def test_a_wrong_assumption_without_effect_is_accepted(
    policy: str, assumed: list[str], kinds: list[str]
) -> None:
    check_declared(policy_from_spec(policy), assumed, kinds)
