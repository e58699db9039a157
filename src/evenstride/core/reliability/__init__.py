"""Lifetimes of machines, and the checkpoint interval that follows from them.

Start with `checkpoint_interval`. Planner, simulator and `Checkpointer` share it.
"""

from __future__ import annotations

from evenstride.core.reliability.checkpoint_interval import (
    NextSave,
    Observed,
    Saving,
    daly_s,
    due_in_s,
    expected_losses,
    next_save_in_s,
    saves_per_s,
    young_s,
)
from evenstride.core.reliability.job_placement import chance_to_finish, place
from evenstride.core.reliability.lifetimes import Bathtub, Exponential, Lifetime, TwoRates
from evenstride.core.reliability.survival_fit import (
    ChosenModel,
    FittedLifetime,
    Lives,
    choose,
    distance,
    fit_bathtub,
    fit_exponential,
    fit_two_rates,
    kaplan_meier,
    log_likelihood,
)

__all__ = [
    "Bathtub",
    "ChosenModel",
    "Exponential",
    "FittedLifetime",
    "Lifetime",
    "Lives",
    "NextSave",
    "Observed",
    "Saving",
    "TwoRates",
    "chance_to_finish",
    "choose",
    "daly_s",
    "distance",
    "due_in_s",
    "expected_losses",
    "fit_bathtub",
    "fit_exponential",
    "fit_two_rates",
    "kaplan_meier",
    "log_likelihood",
    "next_save_in_s",
    "place",
    "saves_per_s",
    "young_s",
]
