"""Bench: how fast this toolkit is here, beside mlx-lm; the work is `toolkit.bench`'s."""

from __future__ import annotations

import argparse


def bench(args: argparse.Namespace) -> int:
    """Print the table; exit 1 where bits or tokens differ that must not."""
    from ..bench import suite

    return suite.run(args)
