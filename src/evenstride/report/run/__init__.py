"""What happened in a run, from its trace: whose times, which decisions, who waited for whom."""
