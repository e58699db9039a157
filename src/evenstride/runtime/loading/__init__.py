"""The data path: from the shares of a step to the mini-batches of the training loop.

Start with `loader`. `sampler` draws indices ahead of training; `position` counts committed samples.
"""
