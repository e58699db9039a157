"""From what was asked, such as ``csv:metrics.csv``, to open sinks; all refusals are made here."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenstride.errors import ConfigError
from evenstride.runtime.sinks.csv_file import CsvSink
from evenstride.runtime.sinks.prometheus import PrometheusSink, why
from evenstride.runtime.sinks.snapshot import Sink
from evenstride.runtime.sinks.tensorboard import TensorBoardSink

LOOPBACK = "127.0.0.1"
POSSIBLE = "csv:FILE, prometheus:[HOST:]PORT and tensorboard:FOLDER"
_PACKAGES = {"prometheus": "prometheus-client", "tensorboard": "tensorboard"}
_KINDS = ("csv", *_PACKAGES)
_ADDRESS = re.compile(r"(?:(?P<host>\[[^\[\]]+\]|[^\[\]:]+):)?(?P<port>[0-9]{1,5})", re.ASCII)
_LAST_PORT = 65535


def sinks_of(asked: Any) -> tuple[str, ...]:
    """Return the sinks that were asked for, one text each.

    Args:
        asked: text with one sink or several, with commas between them; or a sequence of texts,
            each with one.

    Raises:
        ConfigError: it is neither, one of them cannot be, or one is there twice.
    """
    if isinstance(asked, str):
        asked = [text.strip() for text in asked.split(",") if text.strip()]
    if not isinstance(asked, Sequence) or not all(isinstance(text, str) for text in asked):
        raise ConfigError(
            f"sinks is {asked!r}; it must be text such as 'csv:metrics.csv', or a list of such "
            f"texts; there are {POSSIBLE}"
        )
    for text in asked:
        _parsed(text)
    twice = sorted({text for text in asked if asked.count(text) > 1})
    if twice:
        raise ConfigError(f"the sink {twice[0]!r} is there twice; leave one of them out")
    return tuple(asked)


def open_sinks(asked: Sequence[str]) -> dict[str, Sink]:
    """Return the open sinks by what was asked; those opened before one that cannot are closed.

    Raises:
        ConfigError: one cannot be opened: its port is in use, its file or folder cannot be written,
            or its package is not there.
    """
    with contextlib.ExitStack() as opened:
        sinks = {}
        for text in asked:
            sinks[text] = sink = _open(text)
            opened.callback(sink.close)
        opened.pop_all()
        return sinks


def _parsed(text: str) -> tuple[str, str]:
    kind, colon, where = text.partition(":")
    if kind not in _KINDS or not colon or not where.strip():
        raise ConfigError(f"there is no sink {text!r}; there are {POSSIBLE}")
    if kind == "prometheus":
        _address(text, where)
    return kind, where


def _address(text: str, where: str) -> tuple[str, int]:
    found = _ADDRESS.fullmatch(where.strip())
    if found is None or int(found["port"]) > _LAST_PORT:
        raise ConfigError(
            f"the sink {text!r} has no port that can be; it must be 0 (any free one) to "
            f"{_LAST_PORT}, such as prometheus:9108, or prometheus:0.0.0.0:9108 to let other "
            "machines ask"
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
        return CsvSink(Path(where))
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"the sink {text!r} needs the package {_PACKAGES[kind]}, which cannot be imported "
            f"({error}); install it with pip install 'evenstride[{kind}]', or leave the sink out"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the sink {text!r} cannot be opened: {why(error)}; name another one, or leave it out"
        ) from None
