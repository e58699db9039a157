"""The command line: parse, call, print. Start with `main`.

`commands` has one module per command, `render` draws on terminals, and the other modules here are
what commands share. Any package may be imported, but torch only when a command needs it.
"""
