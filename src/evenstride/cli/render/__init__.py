"""Drawing on terminals: the live table, ``top``'s dashboard, progress, prose between margins.

Knows values to show and no commands. Start with `terminal_text`.
"""
