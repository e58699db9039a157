"""All predictors of the workers' speeds, by name. Start with `predictor`, their interface."""

from __future__ import annotations

from typing import Any

from evenstride.core.predictors.autoregressive import Autoregressive
from evenstride.core.predictors.moving_average import Last, MovingAverage
from evenstride.core.predictors.narx import Narx
from evenstride.core.predictors.predictor import Predictor
from evenstride.errors import ConfigError

_PREDICTORS: dict[str, type[Any]] = {
    "ar": Autoregressive,
    "ema": MovingAverage,
    "last": Last,
    "narx": Narx,
}
PREDICTOR_NAMES = tuple(_PREDICTORS)


def predictor_named(name: str) -> Predictor[Any]:
    """Return the predictor of that name, as it comes.

    Raises:
        ConfigError: there is none.

    >>> predictor_named("ema")
    MovingAverage(smoothing=0.3)
    """
    if name not in _PREDICTORS:
        raise ConfigError(
            f"there is no predictor {name!r}; choose one of: {', '.join(PREDICTOR_NAMES)}"
        )
    predictor: Predictor[Any] = _PREDICTORS[name]()
    return predictor
