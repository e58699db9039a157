"""Read the bodies of answers without trusting them."""

from __future__ import annotations

import json
from typing import Any

from evenstride.runtime.notices.notice import NoAnswer


def json_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in ``body``.

    Raises:
        NoAnswer: there is none.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NoAnswer("garbage", f"its answer is no JSON: {body[:60]!r}") from error
    if not isinstance(value, dict):
        raise NoAnswer("garbage", f"its answer is no JSON object: {body[:60]!r}")
    return value


def plain_text(body: bytes) -> str:
    """Return ``body`` as a line of text, without the white space around it.

    Raises:
        NoAnswer: it is no text, empty, or several lines.
    """
    text = body.decode("utf-8", "replace").strip()
    if not text or not text.isprintable() or "\N{REPLACEMENT CHARACTER}" in text:
        raise NoAnswer("garbage", f"its answer is no line of text: {body[:60]!r}")
    return text


def unexpected(status: int) -> NoAnswer:
    """Return the error for a status that says neither yes nor no."""
    return NoAnswer(f"status {status}", f"it answered with status {status}")
