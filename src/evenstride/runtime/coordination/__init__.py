"""How ranks agree: settings at the start, then exchanges with the leader's decisions.

Start with `control_plane` for the ranks' side and `leader` for the leader's. `draw_barrier` makes
decisions take effect at the same step everywhere. `coordinator` is what training asks of all this,
and of live mode likewise.
"""
