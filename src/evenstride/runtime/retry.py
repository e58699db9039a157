"""What the loader has to hand out once more."""

from __future__ import annotations

import enum


class Retry(enum.Enum):
    """What comes again because a batch did not fit into memory."""

    NO = 0
    BATCH = 1
    STEP = 2

    def __bool__(self) -> bool:
        return self is not Retry.NO
