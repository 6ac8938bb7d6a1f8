"""Invariance: which shapes keep bits, as measured on this device; and a forward built with them."""
