"""Parse and open the requested sinks, such as ``csv:metrics.csv``; raise all their errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenstride.core.spec import parse_spec
from evenstride.errors import ConfigError
from evenstride.runtime.sinks.background_sink import BackgroundSink
from evenstride.runtime.sinks.csv_sink import CsvSink
from evenstride.runtime.sinks.mlflow_sink import MlflowSink
from evenstride.runtime.sinks.prometheus_sink import PrometheusSink, why
from evenstride.runtime.sinks.snapshot import Sink
from evenstride.runtime.sinks.tensorboard_sink import TensorBoardSink
from evenstride.runtime.sinks.wandb_sink import WandbSink

LOOPBACK = "127.0.0.1"
POSSIBLE = (
    "csv:FILE, mlflow[:EXPERIMENT], prometheus:[HOST:]PORT, tensorboard:FOLDER and wandb[:PROJECT]"
)
_PACKAGES = {
    "mlflow": "mlflow-skinny",
    "prometheus": "prometheus-client",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
# The environment may say where these write.
_TRACKERS = ("mlflow", "wandb")
_KINDS = ("csv", *_PACKAGES)
_ADDRESS = re.compile(r"(?:(?P<host>\[[^\[\]]+\]|[^\[\]:]+):)?(?P<port>[0-9]{1,5})", re.ASCII)
_LAST_PORT = 65535
# An entity is optional; W&B permits at most 128 characters, and not these.
_PROJECT = re.compile(r"(?:[^/\\#?%:\s]+/)?[^/\\#?%:]{1,128}")


def sinks_of(asked: Any) -> tuple[str | Sink, ...]:
    """Return the requested sinks: texts, objects with the methods of `Sink`, or a list of these.

    Raises:
        ConfigError: a sink does not exist or is listed twice.
    """
    if isinstance(asked, str):
        asked = [text.strip() for text in asked.split(",") if text.strip()]
    if _is_sink(asked):
        asked = [asked]
    if not isinstance(asked, Sequence) or not all(isinstance(x, str) or _is_sink(x) for x in asked):
        raise ConfigError(
            f"sinks is {asked!r}; it must be text such as 'csv:metrics.csv', an object with the "
            f"methods of evenstride.Sink, or a list of these; available sinks: {POSSIBLE}"
        )
    for one in asked:
        if isinstance(one, str):
            _parsed(one)
    twice = [one for place, one in enumerate(asked) if one in asked[:place]]
    if twice:
        raise ConfigError(f"the sink {twice[0]!r} is listed twice; remove one of the two")
    return tuple(asked)


def _is_sink(value: object) -> bool:
    methods = ("write", "close")
    # A class has these methods as well, but it is not an open sink.
    return not isinstance(value, type) and all(callable(getattr(value, m, None)) for m in methods)


def open_sinks(asked: Sequence[str | Sink]) -> dict[str, Sink]:
    """Return the open sinks by name.

    An object is already open; its name is that of its class with its position in the list.

    Raises:
        ConfigError: a sink cannot be opened. The others are closed first.
    """
    with contextlib.ExitStack() as opened:
        sinks = {}
        for place, one in enumerate(asked):
            name = one if isinstance(one, str) else f"{type(one).__name__} ({place})"
            sinks[name] = sink = _open(one) if isinstance(one, str) else one
            opened.callback(sink.close)
        # All are open, so the exit stack must not close them.
        opened.pop_all()
        return sinks


def _parsed(text: str) -> tuple[str, str]:
    spec = parse_spec(text)
    kind, where = spec.name, spec.argument or ""
    named = bool(where.strip()) or kind in _TRACKERS
    if kind not in _KINDS or not named or not spec.closed:
        raise ConfigError(f"unknown sink {text!r}; available sinks: {POSSIBLE}")
    if kind == "prometheus":
        _address(text, where)
    elif kind == "wandb" and where.strip() and not _PROJECT.fullmatch(where.strip()):
        raise ConfigError(
            f"the sink {text!r} has no valid project; it must be PROJECT or ENTITY/PROJECT, with "
            "at most 128 characters in the project and without / \\ # ? % and :"
        )
    return kind, where


def _address(text: str, where: str) -> tuple[str, int]:
    found = _ADDRESS.fullmatch(where.strip())
    if found is None or int(found["port"]) > _LAST_PORT:
        raise ConfigError(
            f"the sink {text!r} has no valid port; it must be 0 (any free port) to {_LAST_PORT}, "
            "such as prometheus:9108, or prometheus:0.0.0.0:9108 to accept requests from other "
            "machines"
        )
    return (found["host"] or LOOPBACK).strip("[]"), int(found["port"])


def _open(text: str) -> Sink:
    kind, where = _parsed(text)
    try:
        match kind:
            case "prometheus":
                return PrometheusSink(*_address(text, where))
            case "tensorboard":
                return TensorBoardSink(Path(where))
            case "mlflow":
                return BackgroundSink(MlflowSink(where.strip()))
            case "wandb":
                return WandbSink(where.strip())
        return CsvSink(Path(where))
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"the sink {text!r} needs the package {_PACKAGES[kind]}, which cannot be imported "
            f"({error}); install it with pip install 'evenstride[{kind}]', or remove the sink"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the sink {text!r} cannot be opened: {why(error)}; name another sink, or remove it"
        ) from None
