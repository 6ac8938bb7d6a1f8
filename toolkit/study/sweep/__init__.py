"""Sweep: a study over a grid of parameters, on one machine or several."""
