"""Watches for preemption notices to this machine or process.

A cloud publishes them in a metadata service that only the machine itself can reach. Batch systems
and Kubernetes send a signal. A `NoticeWatcher` watches both on its own threads. It calls back when
a notice arrives, when its time changes, and when it is withdrawn. `core.membership.member_table`
decides the consequences of a notice. Start with `watcher`.
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
