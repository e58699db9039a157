"""Weights of losses, so that averages are exact, and the noise of gradients.

Start with `weighting`, which is the whole proof in one function.
"""
