"""The torch side: measure, deliver, weigh, commit. It decides nothing."""
