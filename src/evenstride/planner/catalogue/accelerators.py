"""What accelerators can do at most, to carry times over to types that were not measured."""

from __future__ import annotations

from dataclasses import dataclass

from evenstride.planner.catalogue.offers import Offer


@dataclass(frozen=True, slots=True)
class Power:
    """What one worker's device can do at most."""

    flops_per_s: float
    bytes_per_s: float
    gib: float | None = None


ACCELERATORS: dict[str, Power] = {
    name: Power(tflops * 1e12, gbytes * 1e9, gib)
    for name, tflops, gbytes, gib in (
        ("K520", 2.4, 160, 4),
        ("K80", 4.1, 240, 12),
        ("M60", 4.8, 160, 8),
        ("P4", 5.5, 192, 8),
        ("P100", 9.5, 732, 16),
        ("V100", 15.7, 900, 16),
        ("V100-32GB", 15.7, 900, 32),
        ("T4", 8.1, 320, 16),
        ("T4G", 8.1, 320, 16),
        ("A10", 31.2, 600, 24),
        ("A10G", 31.2, 600, 24),
        ("L4", 30.3, 300, 24),
        ("L40S", 91.6, 864, 48),
        ("A100", 19.5, 1555, 40),
        ("A100-80GB", 19.5, 2039, 80),
        ("H100", 67.0, 3350, 80),
        ("H200", 67.0, 4800, 141),
    )
}
"""Peak of single precision and of the memory's bandwidth, one accelerator each, boards with two
processors as two.

Source:
    The makers' data sheets as public tables repeat them: T4, V100, A100 and H100 were read there;
    the others are from memory and not verified. Half-precision peaks are left out: they would make
    every newer card look further ahead than arithmetic alone does, and the error of a transfer
    covers it or not, as the workload happens to be.
"""

SHARED = ("t1.", "t2.", "t3.", "t3a.", "t4g.", "e2-micro", "e2-small", "e2-medium", "f1-", "g1-")
"""How the names of machines begin whose processors are theirs for a part of the time only."""


def power(offer: Offer) -> Power | None:
    """Return what one worker of a machine can do; ``None`` if it is not known.

    A machine without accelerators is one worker, in proportion to its virtual processors, if these
    are its own. Such a power can be compared with its own kind only.
    """
    if offer.accelerator:
        return ACCELERATORS.get(offer.accelerator)
    if not offer.vcpus or offer.instance_type.startswith(SHARED):
        return None
    return Power(offer.vcpus, offer.vcpus, offer.memory_gib)
