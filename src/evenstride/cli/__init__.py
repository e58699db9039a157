"""The command line: parse, call, print. Start with `main`.

`commands` has one module per command, and the modules here are what commands share. Any package
may be imported, but torch only when a command needs it. A command imports what it does its work
with when it is called, so that help comes at once.
"""
