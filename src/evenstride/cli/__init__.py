"""The command line: parse, call, print. Nothing here imports torch before it is needed."""
