"""Adapters to other libraries. Import the one you need; they do not depend on each other.

Start with `lightning` or `streaming_data`; `torchft` is a package for live mode.
"""
