"""Results as tables, sentences and plots. No torch.

`analysis` derives what happened in a run from its trace; the rest draws. Start with
`analysis.run_timeline`.
"""
