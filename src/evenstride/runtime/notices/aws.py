"""AWS: spot interruption notices from version 2 of the instance metadata service.

``PUT latest/api/token`` with ``X-aws-ec2-metadata-token-ttl-seconds`` returns a token. Every
``GET`` sends it as ``X-aws-ec2-metadata-token``. ``latest/meta-data/spot/instance-action`` returns
404 until an interruption is due. Then it returns
``{"action": "terminate", "time": "2017-09-18T08:22:00Z"}``, at best two minutes ahead. It is polled
every 5 s, as the manual recommends. ``hibernate`` begins at once.

Sources: the Amazon EC2 User Guide, "Spot Instance interruption notices" (two minutes, best effort,
the three actions, hibernation, 5 s) and "EC2 instance rebalance recommendations" (an increased
risk; may come with the notice). Paths, headers, fields and the meaning of 404 (no notice) and 401
(expired token) come from aws/aws-node-termination-handler, ``pkg/ec2metadata``. Neither source
mentions the withdrawal of a notice; a 404 after a notice is read as one. The first version of the
service, without a token, is not used.
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
# The longest lifetime of a token, and how long before its end it is renewed.
_TTL_S, _RENEW_S = 21600, 60.0
_ACTIONS = ("terminate", "stop", "hibernate")


def parse(status: int, body: bytes) -> Notice | None:
    """Return the notice in a response to `ACTION_PATH`; times are by the service's clock.

    Raises:
        NoAnswer: the response is invalid, so it is not known whether there is a notice.
    """
    if status == 404:
        return None
    if status != 200:
        raise unexpected(status)
    announced = json_object(body)
    action = announced.get("action")
    if action not in _ACTIONS:
        raise NoAnswer("garbage", f"its response has an unknown action {action!r:.60}")
    leaves_unix_s = None if action == "hibernate" else _unix_s(announced.get("time"))
    return Notice("aws", leaves_unix_s, True, False, f"spot interruption ({action})")


def parse_rebalance(status: int, body: bytes) -> Notice | None:
    """Return the notice in a response to `REBALANCE_PATH`; it has no time and may be withdrawn.

    Raises:
        NoAnswer: as in `parse`.
    """
    if status == 404:
        return None
    if status != 200:
        raise unexpected(status)
    if not isinstance(json_object(body).get("noticeTime"), str):
        raise NoAnswer("garbage", f"its rebalance recommendation has no time: {body[:60]!r}")
    return Notice("aws", None, True, True, "rebalance recommendation")


def _unix_s(text: object) -> float | None:
    """Return the Unix time of ``2017-09-18T08:22:00Z``; ``None`` (at any moment) if invalid."""
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
        base_url: address of the metadata service.
        rebalance: treat a rebalance recommendation as a notice. It only reports an increased risk,
            so many instances that receive one are never interrupted.
        timeout_s: the limit for a request and its response.
        clock: returns Unix time in seconds.
        steady: returns monotonic seconds, for the age of the token.
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
        """Send one request, or two if rebalance recommendations count.

        Raises:
            NoAnswer: see `NoticeSource.poll`.
            Interrupted: see `NoticeSource.poll`.
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
        if answer.status == 401:  # the token expired early, for example during a suspend
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
        ttl = answer.headers.get(TTL_HEADER.lower(), "")
        ttl_s = float(ttl) if ttl.isascii() and ttl.isdigit() and len(ttl) < 9 else _TTL_S
        self._renew_at_s = asked_s + ttl_s - min(_RENEW_S, 0.5 * ttl_s)
