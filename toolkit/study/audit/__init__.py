"""Audit: whether somebody's engine or server keeps its promise to seeded requests."""
