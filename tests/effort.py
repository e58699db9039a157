"""How much a test of the suite may take upon itself."""

from __future__ import annotations

from hypothesis import settings

# For a property whose examples are whole simulated runs or searches, at a tenth of a second or more
# each: a third of what the profile asks of the others, so that a longer profile is longer here too.
dear = settings(max_examples=settings().max_examples // 3)
