"""The commands of ``evenstride``, one module each, named as the command."""
