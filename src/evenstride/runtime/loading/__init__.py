"""From the shares of a step to the batch that the training loop gets.

Start with `loader`; `sampler` draws indices ahead of training, `position` is what is committed.
"""
