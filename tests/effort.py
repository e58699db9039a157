"""Settings for property tests with costly examples."""

from __future__ import annotations

from hypothesis import settings

# For a property whose examples are whole simulated runs or searches of 0.1 s or more each. It draws
# a third of the profile's number of examples, so that a longer profile applies here too.
expensive = settings(max_examples=settings().max_examples // 3)
