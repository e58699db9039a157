"""Parts of `evenstride.integrations.transformers`, which has the names for users."""
