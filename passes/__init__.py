"""Rewriting passes over the graphs of pieces; the ordered pipeline is empty so far."""
