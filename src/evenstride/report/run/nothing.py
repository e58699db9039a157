"""What is said of a trace that tells of no run."""

from __future__ import annotations

from evenstride.errors import TraceError
from evenstride.report.run.story import Story
from evenstride.report.words import plain


def nothing_to_show(story: Story) -> TraceError:
    """Return the error of a run in which no workers have met, with what is missing.

    Args:
        story: of it, read to its end.
    """
    told = "; ".join(map(plain, story.unread))
    if not told:
        told = "its header is there, but its workers have not met yet; look again once they train"
    return TraceError(f"{plain(story.path)} tells of no run: {told}")
