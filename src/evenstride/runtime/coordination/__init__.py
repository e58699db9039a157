"""How ranks agree: on settings at the start, then on decisions in exchanges with the leader.

Start with `control_plane` for the ranks' side and `leader` for the leader's side. `draw_barrier`
makes a decision take effect at the same step on every rank. `coordinator` is the interface through
which training uses these modules, and live mode.
"""
