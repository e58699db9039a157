"""All policies by name, for `Stride`, the command line and the simulator.

Start with `adaptive`, the default. `static` has the policies that never move shares. The others are
published policies, one module per paper or family, with their source.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

from evenstride.core.policies.static import GivenShares, Static
from evenstride.core.policy import Policy
from evenstride.core.spec import (
    Spec,
    is_import_path,
    numbers,
    parse_spec,
    settings_in,
    spec_text,
)
from evenstride.errors import ConfigError, UnknownPolicy

# Imported on demand: a run uses one policy, and pays for its import at every restart.
_PLAIN = {
    "adaptive": "adaptive.Adaptive",
    "dbs": "dbs.Dbs",
    "dynamic-batching": "dynamic_batching.DynamicBatching",
    "lb-bsp-cpu": "lb_bsp.LbBspCpu",
    "lb-bsp-gpu": "lb_bsp.LbBspGpu",
    "omnilearn": "dynamic_batching.OmniLearn",
    "uniform": "static.Uniform",
}
_FORM = "{}:{}"
POLICY_NAMES = tuple(sorted([*_PLAIN, "static"]))


def policy_from_spec(text: str, *, imported: bool = True) -> Policy[Any]:
    """Return the policy of a specification.

    ``adaptive`` is a policy with its defaults. ``static:20,100`` has its shares after the colon.
    ``dynamic-batching:dead_band=0.1,window=5`` or ``lb-bsp-cpu(predictor=ema)`` change settings
    by name. ``my_module.MyPolicy:step=4`` imports a user's own class. Without ``imported``, that
    is unknown: a trace from elsewhere must not choose what is imported.

    Raises:
        UnknownPolicy: no policy has this name.
        ConfigError: the rest is invalid, or the class cannot be imported.

    >>> policy_from_spec("static:20,100")
    GivenShares(shares=(20, 100))
    >>> policy_from_spec("dynamic-batching:window=5").window
    5
    """
    spec = parse_spec(text)
    if spec.name == "static":
        return _static(spec)
    if imported and is_import_path(spec.name):
        return _own(spec)
    if spec.name not in _PLAIN:
        raise UnknownPolicy(text, POLICY_NAMES)
    kind = _load(_PLAIN[spec.name])
    policy: Policy[Any] = kind(**settings_in(spec, "policy", kind, _FORM))
    return policy


def spec_of(policy: Policy[Any]) -> str:
    """Return the text that identifies a policy: in a trace's header, and compared between ranks.

    For a policy of this package it is a specification for `policy_from_spec`. For a user's own
    policy it is the class, with its settings if the class is a dataclass.

    >>> spec_of(policy_from_spec("dynamic-batching:window=5"))
    'dynamic-batching:window=5'
    """
    kind: Any = type(policy)
    if isinstance(policy, GivenShares):
        return f"static:{','.join(map(str, policy.shares))}"
    if isinstance(policy, Static):
        return "static" if policy.by == "flops" else f"static:{policy.by}"
    name = next((name for name, place in _PLAIN.items() if _is_at(kind, place)), None)
    if name is None:
        # Ranks compare this text, and the repr of any other object may contain an address.
        settings = repr(policy).partition("(")[1:] if is_dataclass(policy) else ()
        return f"{kind.__module__}.{kind.__qualname__}{''.join(settings)}"
    return spec_text(name, policy, _FORM)


def is_policy(value: object) -> bool:
    return (
        not isinstance(value, type)
        and hasattr(value, "opening_steps")
        and all(callable(getattr(value, name, None)) for name in ("init", "decide"))
    )


def _is_at(kind: type[Any], place: str) -> bool:
    # By name, so that the comparison imports no other policy.
    return f"{kind.__module__}.{kind.__name__}" == f"{__name__}.{place}"


def _load(place: str) -> type[Any]:
    module, _, name = place.partition(".")
    kind: type[Any] = getattr(import_module(f"{__name__}.{module}"), name)
    return kind


def _own(spec: Spec) -> Policy[Any]:
    module, _, name = spec.name.rpartition(".")
    try:
        kind = getattr(import_module(module), name)
        policy = kind(**dict(_own_settings(spec)))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"cannot create policy {spec.text!r}: {error}; expected a class in a module that "
            "Python can import from this folder or PYTHONPATH, and settings of its constructor, "
            "such as my_module.MyPolicy:step=4"
        ) from error
    if not is_policy(policy):
        raise ConfigError(
            f"policy {spec.text!r} is no policy: expected an object with opening_steps, init() "
            "and decide(), see evenstride.Policy"
        )
    made: Policy[Any] = policy
    return made


def _own_settings(spec: Spec) -> Iterator[tuple[str, object]]:
    for part in filter(None, map(str.strip, (spec.argument or "").split(","))):
        name, equals, text = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ValueError(f"{part!r} is not of the form name=value")
        # The class is not ours, so the types of its settings are unknown: numbers, else text.
        try:
            yield name, literal_eval(text)
        except (SyntaxError, ValueError):
            yield name, text


def _static(spec: Spec) -> Policy[Any]:
    match spec.argument:
        case None | "" | "flops":
            return Static("flops")
        case "cores":
            return Static("cores")
    shares = numbers(spec.argument, int)
    if not shares or min(shares) < 0 or not any(shares):
        raise ConfigError(
            f"invalid policy {spec.text!r}: expected static (measured FLOP/s), static:cores, or "
            "the shares in rank order, such as static:20,100"
        )
    return GivenShares(shares)
