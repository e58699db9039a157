"""One training whose workers and batch are found while it goes on: ``evenstride plan --online``."""
