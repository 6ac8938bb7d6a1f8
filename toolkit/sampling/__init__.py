"""Sampling: filters and the draw over [rows, vocab] logits, each row by its own parameters and noise.

The engine compiles a batch's rows once and draws at every step::

    sampler = Sampler([Draw(request, seed, choice), ...])
    drawn = sampler.draw(logits, positions)              # keyed; add histories= if sampler.needs_history
    keys = sampler.keys(positions)                       # ahead of time, for draw(..., keys=keys)
    drawn = sampler.draw_shared(logits, together=True)   # MLX's global generator, as the peers
    mx.eval(drawn.arrays())

`draw_keyed`, `draw_shared`, `process` and `distribution` are short forms for a single use; `verify`
checks a draft against the draws of plain decoding. Nothing here decides who seeds or when: that is
`policies`.

In reading order: `draws` (what goes in and comes out), `sampler` and `step`, `unfiltered` and `kernels` (no
filter), `chain` with `ranking`, `filters`, `typical` and `drift_bound` (filters), `logits_processors` (mask,
bias, penalties), `verify`.
"""

from .distribution import distribution, draw_keyed, draw_shared, process
from .draws import ORDER, Draw, Drawn
from .filters import Settings
from .sampler import Sampler, sampler_for
from .verify import Verified, verify

__all__ = [
    "ORDER", "Draw", "Drawn", "Sampler", "Settings", "Verified", "distribution", "draw_keyed", "draw_shared",
    "process", "sampler_for", "verify",
]  # fmt: skip
