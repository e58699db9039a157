"""Which machines to train on: offers and prices, forecasts, and the search among them. No torch.

Start with `make_plan`. Imports `sim`, `trace` and `core`.
"""
