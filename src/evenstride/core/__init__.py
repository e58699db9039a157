"""All deciding: pure functions over frozen data, with no torch, clock or randomness."""
