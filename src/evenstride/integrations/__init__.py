"""Adapters to other libraries. Import the one you need; none imports another.

Start with `lightning`; `torchft` is a package of its own, for live mode.
"""
