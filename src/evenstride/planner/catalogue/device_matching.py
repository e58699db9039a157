"""Which offers a measured device stands for, where one type is on offer with several accelerators.

Google's N1 machines can be had without accelerators and with any of a few, all under one name. A
time that was measured with one of them says nothing about the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from evenstride.errors import ConfigError
from evenstride.planner.catalogue.offers import NO_ACCELERATOR, Offer
from evenstride.planner.workload.workload_profile import DeviceProfile

Sorts = Mapping[str, frozenset[str]]
"""Accelerators that each type is on offer with, by its name; an empty name for none."""


def sorts_of(offers: Iterable[Offer]) -> Sorts:
    """Return which accelerators each type is on offer with."""
    found = dict[str, set[str]]()
    for offer in offers:
        found.setdefault(offer.instance_type, set()).add(offer.accelerator)
    return {name: frozenset(all_of) for name, all_of in found.items()}


def identified(device: DeviceProfile, sorts: Sorts) -> tuple[str, str]:
    """Return the type and the accelerator of a device that was measured.

    A type with one accelerator only is known by its name. Else the device's own name tells, such as
    ``Tesla T4``, or the type's with the accelerator behind it, such as ``n1-standard-8+T4`` or
    ``n1-standard-8+none``.

    Raises:
        ConfigError: it could be several.

    >>> sorts = {"n1-standard-8": frozenset({"", "T4"})}
    >>> points = ({"samples": 8, "step_s": 0.1},)
    >>> identified(DeviceProfile(type="n1-standard-8", device="Tesla T4", points=points), sorts)
    ('n1-standard-8', 'T4')
    """
    there = sorts.get(device.type)
    if there is None:
        return _by_full_name(device.type, sorts)
    if len(there) == 1:
        return device.type, next(iter(there))
    named = _parts(device.device)
    fitting = [one for one in sorted(there) if one and _parts(one) <= named]
    if not fitting:
        raise ConfigError(_several(device, there))
    return device.type, max(fitting, key=lambda one: len(_parts(one)))


def _by_full_name(name: str, sorts: Sorts) -> tuple[str, str]:
    own, plus, accelerator = name.rpartition("+")
    wanted = "" if accelerator == NO_ACCELERATOR else accelerator
    return (own, wanted) if plus and wanted in sorts.get(own, ()) else (name, "")


def _parts(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def _several(device: DeviceProfile, there: Iterable[str]) -> str:
    names = [f"{device.type}+{one or NO_ACCELERATOR}" for one in sorted(there)]
    ran = f"ran on {device.device}" if device.device else "does not say on which device it ran"
    return (
        f"{device.type} is on offer with different accelerators, and what was measured {ran}; call "
        f"it {', '.join(names[:-1])} or {names[-1]} (evenstride profile --type, or --as), or give "
        "a --catalog in which the type is there with one of them only"
    )
