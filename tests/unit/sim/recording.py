"""What a simulated run asks of its policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from evenstride.core.fleet import Fleet
from evenstride.core.policy import Decision, Move, Policy, Situation


@dataclass(frozen=True)
class Recording:
    """Decides as a policy does, and keeps each situation: there is one per exchange."""

    policy: Policy[Any]
    situations: list[Situation] = field(default_factory=list)

    @property
    def opening_steps(self) -> int:
        """As long as the policy's."""
        return self.policy.opening_steps

    @property
    def steps(self) -> list[int]:
        """The steps at whose end there was an exchange; a situation counts those before it."""
        return [situation.step - 1 for situation in self.situations]

    def init(self, fleet: Fleet) -> tuple[Any, Move]:
        """Return what the policy does."""
        return self.policy.init(fleet)

    def decide(self, state: Any, situation: Situation) -> tuple[Any, Decision]:
        """Return what the policy does."""
        self.situations.append(situation)
        return self.policy.decide(state, situation)
