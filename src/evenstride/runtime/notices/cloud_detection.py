"""Tell on which cloud this machine runs by what its firmware says, without the network.

Sources: Amazon, "Identify EC2 instances" by way of powersj/whatsthis and KarpelesLab/cloudinfo
(``Amazon EC2`` as the vendor on Nitro, ``amazon`` in the version on Xen); cloud-init
(``Google Compute Engine`` as the product; the chassis' asset tag of all Azure VMs). Vendors alone
are no sign: Google sells notebooks, and Microsoft's hypervisor runs elsewhere, too.
"""

from __future__ import annotations

from pathlib import Path

DMI = Path("/sys/class/dmi/id")
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


def detect_cloud(dmi: Path = DMI) -> str | None:
    """Return ``aws``, ``gcp``, ``azure``, or ``None`` if this machine shows no sign of them.

    Args:
        dmi: the folder in which the kernel shows what the firmware says.
    """
    if _read(dmi, "chassis_asset_tag") == _AZURE_TAG:
        return "azure"
    if _read(dmi, "product_name") == "Google Compute Engine":
        return "gcp"
    on_xen = any(
        "amazon" in _read(dmi, name).lower() for name in ("product_version", "bios_version")
    )
    if _read(dmi, "sys_vendor") == "Amazon EC2" or (_read(dmi, "sys_vendor") == "Xen" and on_xen):
        return "aws"
    return None


def _read(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(errors="replace").strip()
    except OSError:
        return ""
