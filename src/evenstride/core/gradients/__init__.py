"""Weights of losses, which make averages exact, and the noise of gradients.

Start with `weighting`, which is the whole proof in one function.
"""
