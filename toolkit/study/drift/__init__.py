"""Drift: what company does to logits."""
