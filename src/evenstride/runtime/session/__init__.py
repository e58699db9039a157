"""One rank's parts that connect the other packages, each built from those before it.

`rank_session` assembles them. Start with `rank_state`, a rank's own state, then `rank_ties`, its
connections to the others, and `team_coordinator`, which counts its steps.
"""
