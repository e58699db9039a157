"""Strategies for Lightning's Trainer and for Fabric: unequal batches, exact gradients.

Start with `trainer_strategy`. `user_loaders` reads the user's loaders; `step_loader` is what a
Trainer iterates over. Fabric, whose loops run every batch themselves, has `fabric_strategy`.
"""

from evenstride.integrations.lightning.fabric_strategy import EvenFabricStrategy
from evenstride.integrations.lightning.trainer_strategy import EvenStrategy

__all__ = ["EvenFabricStrategy", "EvenStrategy"]
