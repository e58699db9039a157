"""Which machines to train on: offers and prices, forecasts, and the search among them. No torch."""
