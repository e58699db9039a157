"""Adapters to other libraries. Import the one you need; they do not depend on each other.

Start with the one of your framework: `accelerate`, `transformers`, `lightning`, `ray`,
`tensorflow` or `streaming_data`. `torchft` is a package for live mode.
"""
