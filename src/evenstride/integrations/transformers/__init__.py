"""`EvenTrainer` for transformers' Trainer, and `EvenTrainerMixin` for its subclasses.

Start with `even_trainer`. See docs/how-to/transformers.md.
"""

from evenstride.integrations.transformers.even_trainer import EvenTrainer, EvenTrainerMixin

__all__ = ["EvenTrainer", "EvenTrainerMixin"]
