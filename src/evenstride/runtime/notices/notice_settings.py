"""The setting that says what to watch, as one string.

=============== ================================================================================
``auto``        ``signals``, and the cloud this machine runs on, if it shows
``off``         nothing
``aws``         the cloud's metadata service is asked, whatever this machine looks like; so
                ``gcp`` and ``azure``
``aws-rebalance`` ``aws``, and a rebalance recommendation counts as a notice
``signals``     SIGTERM; in a Slurm job SIGUSR1 and SIGUSR2 as well
``SIGTERM@30``  this signal (so SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU), 30 s before the end, also
                ``30s`` or ``2m``; without a time 30 s for SIGTERM, and at any moment for the others
=============== ================================================================================

Several are joined by commas; ``off`` stands alone, and each signal is named once.
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
# How long Kubernetes waits after SIGTERM, and torchrun, unless told otherwise.
GRACE_S = 30.0
_CLOUDS = ("aws", "aws-rebalance", "gcp", "azure")
_SIGNALS = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
NAMES = ("auto", "off", *_CLOUDS, "signals", *_SIGNALS)

# Eleven days: more is a mistake in the unit.
_TOO_LONG_S = 1e6


def make_sources(
    setting: str,
    *,
    slurm: bool = False,
    dmi: Path = DMI,
    base_url: str = LINK_LOCAL,
    clock: Callable[[], float] = time.time,
) -> tuple[NoticeSource, ...]:
    """Return the sources that ``setting`` asks for; none of them has been started.

    Reads files at most; nothing is asked over the network.

    Args:
        setting: as above; small and capital letters count as equal.
        slurm: this process belongs to a Slurm job (``SLURM_JOB_ID`` is set).
        dmi: where the firmware's words are, for ``auto``.
        base_url: of the metadata service.
        clock: seconds since 1970.

    Raises:
        ConfigError: ``setting`` is none of these.

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
    """Return the names that are no signals, and the signals with their grace in seconds."""
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
            f"notices={setting!r} asks for nothing and for something; off stands alone; leave it "
            "out, or the rest"
        )
    return names - {"off"}, graces


def _grace_s(part: str, name: str, argument: str | None) -> float | None:
    if argument is None:
        return GRACE_S if name == "SIGTERM" else None
    grace_s = duration_s(argument, unit="s")
    if grace_s is None or grace_s >= _TOO_LONG_S:
        raise ConfigError(
            f"notices={part!r} asks for a time of {argument!r}; it is the time from the signal to "
            f"the end, in seconds or with a unit; write {name}@120, {name}@2m, or {name} alone"
        )
    return grace_s


def _repeated(setting: str, name: str) -> ConfigError:
    return ConfigError(
        f"notices={setting!r} asks for {name} more than once; a signal leaves one time, in "
        f"seconds from it to the end; write {name}@120 once"
    )


def _unknown(part: str) -> ConfigError:
    return ConfigError(
        f"notices cannot be watched from {part!r}{did_you_mean(part, NAMES)}; possible are "
        f"{', '.join(NAMES)}, a signal also as SIGUSR1@120, several joined by commas; change the "
        "setting notices, or EVENSTRIDE_NOTICES"
    )


def detect_cloud(dmi: Path = DMI) -> str | None:
    """Return ``aws``, ``gcp``, ``azure``, or ``None`` if this machine shows no sign of them.

    Args:
        dmi: the folder in which the kernel shows what the firmware says; nothing is asked over
            the network.

    Source:
        Amazon, "Identify EC2 instances" by way of powersj/whatsthis and KarpelesLab/cloudinfo
        (``Amazon EC2`` as the vendor on Nitro, ``amazon`` in the version on Xen); cloud-init
        (``Google Compute Engine`` as the product; the chassis' asset tag of all Azure VMs).
    """
    # Vendors alone are no sign: Google sells notebooks, and Microsoft's hypervisor runs elsewhere.
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
