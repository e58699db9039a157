"""The command line: parse, call, print. Start with `main`.

`commands` has one module per command; the modules here are shared. A command imports its
dependencies when it is called, so that ``--help`` is fast. Only commands that need torch import it.
"""
