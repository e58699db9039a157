"""A device with virtual time, for tests of code that needs an accelerator; see README.md."""
