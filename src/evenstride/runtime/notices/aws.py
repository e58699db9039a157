"""AWS: the interruption of a spot instance, by the instance metadata service, version 2.

``PUT latest/api/token`` with ``X-aws-ec2-metadata-token-ttl-seconds`` answers a token, which goes
with every ``GET`` as ``X-aws-ec2-metadata-token``. ``latest/meta-data/spot/instance-action`` is 404
until an interruption is due, then ``{"action": "terminate", "time": "2017-09-18T08:22:00Z"}``, two
minutes ahead at best; polled every 5 s as the manual recommends. ``hibernate`` begins at once.

Sources: the Amazon EC2 User Guide, "Spot Instance interruption notices" (two minutes, best effort,
the three actions, hibernation, 5 s) and "EC2 instance rebalance recommendations" (a raised risk,
may come with the notice); for paths, headers, fields, and that 404 means none and 401 an expired
token, aws/aws-node-termination-handler, ``pkg/ec2metadata``. Not found in either: that a notice is
ever taken back; a 404 after a notice is nevertheless read so. The service's first version, without
a token, is not used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from evenstride.runtime.notices.http_transport import (
    LINK_LOCAL,
    Answer,
    MetadataService,
    json_object,
    plain_text,
    unexpected,
)
from evenstride.runtime.notices.notice import NoAnswer, Notice

ACTION_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
TOKEN_PATH = "/latest/api/token"
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "X-aws-ec2-metadata-token"
# The longest a token can live, and how long before its end a new one is got.
_TTL_S, _RENEW_S = 21600, 60.0
_ACTIONS = ("terminate", "stop", "hibernate")


def parse(status: int, body: bytes) -> Notice | None:
    """Return the notice in an answer to `ACTION_PATH`; times are as the service told them.

    Raises:
        NoAnswer: the answer says neither that there is one nor that there is none.
    """
    if status == 404:
        return None
    if status != 200:
        raise unexpected(status)
    told = json_object(body)
    action = told.get("action")
    if action not in _ACTIONS:
        raise NoAnswer("garbage", f"an action of {action!r:.60} is not known")
    leaves_unix_s = None if action == "hibernate" else _unix_s(told.get("time"))
    return Notice("aws", leaves_unix_s, True, False, f"spot interruption ({action})")


def parse_rebalance(status: int, body: bytes) -> Notice | None:
    """Return the notice in an answer to `REBALANCE_PATH`: no time, and no certainty.

    Raises:
        NoAnswer: as `parse`.
    """
    if status == 404:
        return None
    if status != 200:
        raise unexpected(status)
    if not isinstance(json_object(body).get("noticeTime"), str):
        raise NoAnswer("garbage", f"its recommendation has no time: {body[:60]!r}")
    return Notice("aws", None, True, True, "rebalance recommendation")


def _unix_s(text: object) -> float | None:
    """Return the time of ``2017-09-18T08:22:00Z``; ``None``, at any moment, if it is none."""
    try:
        time_ = datetime.fromisoformat(text) if isinstance(text, str) else None
        if time_ is None:
            return None
        return (time_ if time_.tzinfo else time_.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


class Aws(MetadataService):
    """Notices of AWS.

    Args:
        base_url: of the metadata service.
        rebalance: take a rebalance recommendation for a notice to leave; it tells of a raised
            risk only, so many instances that got one are never interrupted.
        timeout_s: how long an exchange may take.
        clock: seconds since 1970.
        steady: seconds that never jump, for the age of the token.
    """

    name = "aws"

    def __init__(
        self,
        base_url: str = LINK_LOCAL,
        *,
        rebalance: bool = False,
        timeout_s: float = 2.0,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(base_url, timeout_s=timeout_s, clock=clock)
        self._rebalance, self._steady = rebalance, steady
        self._token, self._renew_at_s = "", float("-inf")

    def poll(self) -> Notice | None:
        """Ask once.

        Raises:
            NoAnswer: as of every source.
            Interrupted: as of every source.
        """
        answer = self._get(ACTION_PATH)
        notice = self._on_host_clock(parse(answer.status, answer.body), answer)
        if notice is None and self._rebalance:
            answer = self._get(REBALANCE_PATH)
            notice = parse_rebalance(answer.status, answer.body)
        return notice

    def _get(self, path: str) -> Answer:
        if self._steady() >= self._renew_at_s:
            self._renew()
        answer = self._wire.ask("GET", path, {TOKEN_HEADER: self._token})
        if answer.status == 401:  # the token has ended early, as when the machine was suspended
            self._renew()
            answer = self._wire.ask("GET", path, {TOKEN_HEADER: self._token})
        return answer

    def _renew(self) -> None:
        self._renew_at_s = float("-inf")
        asked_s = self._steady()
        answer = self._wire.ask("PUT", TOKEN_PATH, {TTL_HEADER: str(_TTL_S)})
        if answer.status != 200:
            raise NoAnswer(
                f"token, status {answer.status}", f"it refused a token (status {answer.status})"
            )
        self._token = plain_text(answer.body)
        told = answer.headers.get(TTL_HEADER.lower(), "")
        ttl_s = float(told) if told.isascii() and told.isdigit() and len(told) < 9 else _TTL_S
        self._renew_at_s = asked_s + ttl_s - min(_RENEW_S, 0.5 * ttl_s)
