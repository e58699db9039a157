"""Results as people read them: tables, sentences, plots. No torch.

`analysis` works out what happened in a run from its trace; everything else draws. Start with
`analysis.run_timeline`.
"""
