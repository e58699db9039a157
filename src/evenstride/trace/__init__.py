"""The record of a run: events and decisions as versioned JSON lines."""
