"""Adapters to other libraries. Import the one you need; they do not depend on each other.

Start with `lightning`; `ray` is for Ray Train, and `torchft` is a package for live mode.
"""
