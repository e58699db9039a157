"""Simulated clusters under the controller of real runs. No torch.

Start with `engine.lockstep`. `scenario` reads files and recorded losses, and `scoring` judges runs.
"""
