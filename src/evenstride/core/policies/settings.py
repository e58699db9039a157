"""The ranges of what can be set of a policy."""

from __future__ import annotations

from math import inf

from evenstride.errors import ConfigError


def check_range(policy: str, name: str, value: float, least: float, most: float = inf) -> None:
    """Raise unless a setting is in its range.

    Raises:
        ConfigError: names the policy, the setting and its range.
    """
    if not least <= value <= most:  # nor is it if it is not a number
        allowed = f"at least {least}" if most == inf else f"from {least} to {most}"
        raise ConfigError(f"policy {policy}: {name} is {value}; it must be {allowed}")
