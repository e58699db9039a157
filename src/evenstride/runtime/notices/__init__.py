"""Learn that this machine, or this process, will be taken away.

Clouds announce it in a metadata service that only the machine itself can ask; batch systems and
Kubernetes announce it with a signal. A `NoticeWatcher` asks and listens on threads of its own. It
calls back when there is a notice, when its time changes, and when it is withdrawn. What follows
from a notice is decided in `core.membership.member_table`. Start with `watcher`.
"""

from __future__ import annotations

from evenstride.runtime.notices.aws import Aws
from evenstride.runtime.notices.azure import Azure
from evenstride.runtime.notices.gcp import Gcp
from evenstride.runtime.notices.notice import Notice, NoticeSource, earliest
from evenstride.runtime.notices.notice_settings import detect_cloud, make_sources
from evenstride.runtime.notices.signals import Signals
from evenstride.runtime.notices.watcher import NoticeWatcher

__all__ = [
    "Aws",
    "Azure",
    "Gcp",
    "Notice",
    "NoticeSource",
    "NoticeWatcher",
    "Signals",
    "detect_cloud",
    "earliest",
    "make_sources",
]
