"""Tests; run from the top of the repository."""
