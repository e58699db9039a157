"""The decision path: `advance.advance` takes a state and an event, and returns instructions.

`events` names what can happen and what the leader must do; `state` is all that the leader knows.
Imports the rest of `core`; the leader, live mode, the simulator, replays and reports import it.
"""
