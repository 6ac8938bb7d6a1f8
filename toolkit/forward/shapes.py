"""Shapes: the rules that keep a row's arithmetic the same whatever runs beside it.

A kernel is chosen by the shapes it is given, so a row's result may depend on its company through shapes only.
`Shapes` says what they are rounded up to. Which values are stable on a device is measured, in `invariance`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shapes:
    """What a packed step's shapes are rounded up to; 1 leaves a shape as it falls.

    Parameters
    ----------
    tile : int
        Tokens through the layers come in multiples of this.
    head : int
        Tokens through the output head come in multiples of this.
    block : int
        Queries of one attention call come in multiples of this. Where grouped heads are folded into the
        query block, the folded rows count.
    bucket : int
        Keys of one attention call come in multiples of this; those past a query's position are masked.
    skip : tuple of int
        Multiples of the bucket that are passed over, since a kernel cuts its sums otherwise there.
    narrow : int
        A decode step of up to this many tokens takes the kernel of `cuda_linear` and its small tile; 0: none
        does.
    """

    tile: int = 1
    head: int = 1
    block: int = 1
    bucket: int = 1
    skip: tuple[int, ...] = ()
    narrow: int = 0

    def keys(self, count: int) -> int:
        """The number of keys that a call takes which needs `count`."""
        keys = round_up(count, self.bucket)
        while keys in self.skip:
            keys += self.bucket
        return keys

    @property
    def plain(self) -> bool:
        """No rule at all: what other engines run."""
        return self.tile == self.head == self.block == self.bucket == 1 and not self.narrow


PLAIN = Shapes()


def round_up(n: int, step: int) -> int:
    """The next multiple of `step` that is at least `n`."""
    return -(-n // step) * step
