"""One rank's parts that join the other packages, each made of those before it; see `rank_session`.

Start with `rank_state`, what a rank knows of itself, then `rank_ties`, what ties it to the others,
and `team_coordinator`, which counts its steps.
"""
