"""All policies by name, as `Stride`, the command line and the simulator know them."""

from __future__ import annotations

from typing import Any

from evenstride.core.policies.adaptive import Adaptive
from evenstride.core.policies.dynamic_batching import DynamicBatching
from evenstride.core.policies.static import Given, Static
from evenstride.core.policies.uniform import Uniform
from evenstride.core.policy import Policy
from evenstride.errors import ConfigError, UnknownPolicy

POLICY_NAMES = ("adaptive", "dynamic-batching", "static", "uniform")


def policy_from_spec(spec: str) -> Policy[Any]:
    """Return the policy that a specification such as ``adaptive`` or ``static:20,100`` names.

    Raises:
        UnknownPolicy: there is no policy of that name.
        ConfigError: the part after the colon is not understood.

    >>> policy_from_spec("static:20,100")
    Given(shares=(20, 100))
    """
    name, _, argument = spec.partition(":")
    if name == "static":
        return _static(spec, argument)
    plain: dict[str, Policy[Any]] = {
        "adaptive": Adaptive(),
        "dynamic-batching": DynamicBatching(),
        "uniform": Uniform(),
    }
    if name not in plain:
        raise UnknownPolicy(spec, POLICY_NAMES)
    if argument:
        raise ConfigError(f"policy {name} takes no argument, but got {argument!r}; write {name}")
    return plain[name]


def _static(spec: str, argument: str) -> Policy[Any]:
    match argument:
        case "" | "flops":
            return Static("flops")
        case "cores":
            return Static("cores")
    try:
        shares = tuple(int(part) for part in argument.split(","))
    except ValueError:
        shares = (-1,)
    if min(shares) < 0 or not any(shares):
        raise ConfigError(
            f"policy {spec!r} is not understood; write static (measured FLOP/s), static:cores, "
            "or the shares themselves in rank order: static:20,100"
        )
    return Given(shares)
