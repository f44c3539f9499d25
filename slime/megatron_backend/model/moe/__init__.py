"""Layers with experts: the router and the experts, the exchange of tokens, the products of all experts at once."""
