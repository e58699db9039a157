"""Parts of `evenstride.integrations.accelerate`: loaders, schedulers, saved positions, refusals.

`even_batches` has the prepared loaders, and `setup_rules` says which loader is for training.
"""
