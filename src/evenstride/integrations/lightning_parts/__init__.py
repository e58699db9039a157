"""Parts of `evenstride.integrations.lightning`.

`user_loaders` reads the user's loaders, `step_loader` is what a Trainer iterates over and logs, and
`trainer_checks` and `strategy_settings` refuse what does not go with unequal batches.
"""
