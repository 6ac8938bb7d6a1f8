"""Seeds: what a seed decides."""
