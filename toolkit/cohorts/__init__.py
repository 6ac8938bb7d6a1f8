"""Cohorts: who runs with whom. Pure functions of values; no MLX."""
