"""Parses the setting for the sources of notices, which is one string.

- ``auto``: ``signals``, and the cloud of this machine, if it is detected
- ``off``: no source
- ``aws``, ``gcp``, ``azure``: the cloud's metadata service, without detection
- ``aws-rebalance``: ``aws``, and a rebalance recommendation counts as a notice
- ``signals``: SIGTERM; in a Slurm job also SIGUSR1 and SIGUSR2
- ``SIGTERM@30``: this signal, 30 s before the end; also ``30s`` or ``2m``. Other signals are
  SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU. Without a time: 30 s for SIGTERM, at any moment for others.

Several names are joined by commas. ``off`` stands alone. Each signal may occur once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from evenstride.core.spec import duration_s, parse_spec
from evenstride.errors import ConfigError, did_you_mean
from evenstride.runtime.notices.aws import Aws
from evenstride.runtime.notices.azure import Azure
from evenstride.runtime.notices.gcp import MAINTENANCE, PREEMPTED, Gcp
from evenstride.runtime.notices.http_transport import LINK_LOCAL
from evenstride.runtime.notices.notice import NoticeSource
from evenstride.runtime.notices.signals import Signals

DMI = Path("/sys/class/dmi/id")
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
# The default of Kubernetes and torchrun for the time from SIGTERM to SIGKILL.
GRACE_S = 30.0
_CLOUDS = ("aws", "aws-rebalance", "gcp", "azure")
_SIGNALS = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
NAMES = ("auto", "off", *_CLOUDS, "signals", *_SIGNALS)

# Eleven days; a longer time has probably the wrong unit.
_TOO_LONG_S = 1e6


def make_sources(
    setting: str,
    *,
    slurm: bool = False,
    dmi: Path = DMI,
    base_url: str = LINK_LOCAL,
    clock: Callable[[], float] = time.time,
) -> tuple[NoticeSource, ...]:
    """Return the sources in ``setting``, not started yet.

    It may read files, but does not use the network.

    Args:
        setting: as above; case is ignored.
        slurm: whether this process belongs to a Slurm job (``SLURM_JOB_ID`` is set).
        dmi: the folder with the firmware's data, for ``auto``.
        base_url: address of the metadata service.
        clock: returns Unix time in seconds.

    Raises:
        ConfigError: ``setting`` is invalid.

    >>> [source.name for source in make_sources("gcp,SIGUSR1@120")]
    ['gcp', 'gcp-maintenance-event', 'signals']
    >>> make_sources("off")
    ()
    """
    names, graces = _read(setting)
    if "auto" in names:
        names |= {"signals", detect_cloud(dmi) or "signals"}
    if "signals" in names:
        default: dict[str, float | None] = {"SIGTERM": GRACE_S}
        if slurm:
            default |= {"SIGUSR1": None, "SIGUSR2": None}
        graces = {**default, **graces}
    sources: list[NoticeSource] = []
    if names & {"aws", "aws-rebalance"}:
        sources.append(Aws(base_url, rebalance="aws-rebalance" in names, clock=clock))
    if "gcp" in names:
        sources += [Gcp(key, base_url, clock=clock) for key in (PREEMPTED, MAINTENANCE)]
    if "azure" in names:
        sources.append(Azure(base_url, clock=clock))
    if graces:
        numbers = {signal.Signals[name]: grace_s for name, grace_s in graces.items()}
        sources.append(Signals(numbers, clock=clock))
    return tuple(sources)


def _read(setting: str) -> tuple[set[str], dict[str, float | None]]:
    """Return the names other than signals, and the signals with their grace times in seconds."""
    names: set[str] = set()
    graces: dict[str, float | None] = {}
    parts = [part.strip() for part in setting.split(",")]
    for part in parts:
        spec = parse_spec(part, separators=":@")
        word, name = spec.name.lower(), spec.name.upper()
        if name in graces:
            raise _repeated(setting, name)
        if name in _SIGNALS:
            graces[name] = _grace_s(part, name, spec.argument)
        elif word in NAMES and spec.argument is None:
            names.add(word)
        else:
            raise _unknown(part)
    if "off" in names and len(parts) > 1:
        raise ConfigError(
            f"notices={setting!r} combines off with other names; remove off, or the other names"
        )
    return names - {"off"}, graces


def _grace_s(part: str, name: str, argument: str | None) -> float | None:
    if argument is None:
        return GRACE_S if name == "SIGTERM" else None
    grace_s = duration_s(argument, unit="s")
    if grace_s is None or grace_s >= _TOO_LONG_S:
        raise ConfigError(
            f"notices={part!r} has an invalid time {argument!r}: expected the time from the signal "
            f"to the end, in seconds or with a unit; write {name}@120, {name}@2m, or only {name}"
        )
    return grace_s


def _repeated(setting: str, name: str) -> ConfigError:
    return ConfigError(
        f"notices={setting!r} has {name} more than once; write each signal once, such as {name}@120"
    )


def _unknown(part: str) -> ConfigError:
    return ConfigError(
        f"unknown source of notices {part!r}{did_you_mean(part, NAMES)}; expected "
        f"{', '.join(NAMES)}, or a signal with a time such as SIGUSR1@120; join several by commas; "
        "change notices or EVENSTRIDE_NOTICES"
    )


def detect_cloud(dmi: Path = DMI) -> str | None:
    """Return ``aws``, ``gcp``, ``azure``, or ``None`` if this machine is not recognised.

    It does not use the network.

    Args:
        dmi: the folder in which the kernel shows the firmware's data.

    Source:
        Amazon, "Identify EC2 instances" by way of powersj/whatsthis and KarpelesLab/cloudinfo
        (``Amazon EC2`` as the vendor on Nitro, ``amazon`` in the version on Xen); cloud-init
        (``Google Compute Engine`` as the product; the chassis' asset tag of all Azure VMs).
    """
    # The vendor is not enough: Google sells notebooks, and Microsoft's hypervisor runs elsewhere.
    if _firmware(dmi, "chassis_asset_tag") == _AZURE_TAG:
        return "azure"
    if _firmware(dmi, "product_name") == "Google Compute Engine":
        return "gcp"
    on_xen = any(
        "amazon" in _firmware(dmi, name).lower() for name in ("product_version", "bios_version")
    )
    if _firmware(dmi, "sys_vendor") == "Amazon EC2" or (
        _firmware(dmi, "sys_vendor") == "Xen" and on_xen
    ):
        return "aws"
    return None


def _firmware(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(errors="replace").strip()
    except OSError:
        return ""
