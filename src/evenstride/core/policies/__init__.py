"""All policies by name, as `Stride`, the command line and the simulator know them."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from math import isfinite
from typing import Any

from evenstride.core.policies.static import Given, Static
from evenstride.core.policy import Policy
from evenstride.errors import ConfigError, UnknownPolicy

# Imported when asked for: a run uses one of them, and pays for the import at every restart.
_PLAIN = {
    "adaptive": "adaptive.Adaptive",
    "dbs": "dbs.Dbs",
    "dynamic-batching": "dynamic_batching.DynamicBatching",
    "lb-bsp-cpu": "lb_bsp_cpu.LbBspCpu",
    "lb-bsp-gpu": "lb_bsp_gpu.LbBspGpu",
    "omnilearn": "omnilearn.OmniLearn",
    "uniform": "uniform.Uniform",
}
_TYPES = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text"}
POLICY_NAMES = tuple(sorted([*_PLAIN, "static"]))


def policy_from_spec(spec: str) -> Policy[Any]:
    """Return the policy that a specification names.

    ``adaptive`` is a policy as it comes, ``static:20,100`` has its shares after the colon, and
    ``dynamic-batching:dead_band=0.1,window=5`` or ``lb-bsp-cpu:predictor=ema`` change settings
    by name.

    Raises:
        UnknownPolicy: there is no policy of that name.
        ConfigError: the part after the colon is not understood.

    >>> policy_from_spec("static:20,100")
    Given(shares=(20, 100))
    >>> policy_from_spec("dynamic-batching:window=5").window
    5
    """
    name, _, argument = spec.partition(":")
    if name == "static":
        return _static(spec, argument)
    if name not in _PLAIN:
        raise UnknownPolicy(spec, POLICY_NAMES)
    kind = _load(_PLAIN[name])
    policy: Policy[Any] = kind(**_settings(spec, kind, argument))
    return policy


def _load(place: str) -> type[Any]:
    module, _, name = place.partition(".")
    kind: type[Any] = getattr(import_module(f"{__name__}.{module}"), name)
    return kind


def _settings(spec: str, policy: type[Any], argument: str) -> dict[str, Any]:
    """Return the settings that an argument such as ``window=5`` changes.

    Raises:
        ConfigError: a setting is not one of the policy's, or its value is not of its type.
    """
    known = {field.name: field.default for field in fields(policy)}
    values: dict[str, Any] = {}
    for part in filter(None, argument.split(",")):
        name, _, text = part.partition("=")
        if name in values:
            raise ConfigError(f"policy {spec!r} sets {name} twice; set it once")
        try:
            values[name] = _value(text, type(known[name]))
        except (KeyError, ValueError):
            options = ", ".join(f"{n}={v}" for n, v in known.items()) or "none"
            what = f" ({name} is {_TYPES[type(known[name])]})" if name in known else ""
            raise ConfigError(
                f"policy {spec!r} is not understood at {part!r}{what}; its settings are: {options}"
            ) from None
    return values


def _value(text: str, kind: type[Any]) -> Any:
    """Return a setting's value as the type of its default.

    Raises:
        ValueError: it cannot be read as such.
    """
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(text)
        return text == "true"
    if kind is float and not isfinite(float(text)):
        raise ValueError(text)
    return kind(text)


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
