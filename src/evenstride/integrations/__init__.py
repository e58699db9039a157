"""Adapters to other libraries. Import the one you need; they do not depend on each other.

Start with `lightning` or `transformers`; `torchft` is a package for live mode.
"""
