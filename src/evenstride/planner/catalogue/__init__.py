"""Machines on offer, their prices with dates, and the peak performance of their accelerators.

Start with `catalogue_reader`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evenstride._importing import later

if TYPE_CHECKING:
    from evenstride.planner.catalogue.catalogue_reader import read_catalogue, shipped_catalogue
    from evenstride.planner.catalogue.live_prices import live_catalogue
    from evenstride.planner.catalogue.offers import price_interval, price_label

__all__ = ["live_catalogue", "price_interval", "price_label", "read_catalogue", "shipped_catalogue"]

__getattr__ = later(
    __name__,
    {
        "catalogue_reader": ("read_catalogue", "shipped_catalogue"),
        "live_prices": ("live_catalogue",),
        "offers": ("price_interval", "price_label"),
    },
)
