"""The decision path: `advance.advance` takes a state and an event, and returns instructions.

`events` defines the events and the leader's instructions; `state` is all that the leader knows.
Imports the rest of `core`. The leader, live mode, the simulator, replays and reports import it.
"""
