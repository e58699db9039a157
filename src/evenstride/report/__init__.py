"""Results as people read them: tables, sentences, plots. No torch, no computing of results."""
