"""Layers with experts: the router and the experts, the exchange of tokens, and one
call for all experts' products."""
