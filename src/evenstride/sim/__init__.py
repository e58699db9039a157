"""Simulated clusters under the controller of real runs. No torch.

Start with `engine.lockstep`. `scenario` reads files and recordings, and `scoring` evaluates runs.
"""
