"""Installed: mlx-lm as it comes, timed in a process of its own: `TOOLKIT_BLAS=off python -m ... DIRECTORY`.

Prompts come as JSON on standard input; out goes `{"seconds": ...}`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SUBSET = 4
"""Prompts that it gets. It makes about seven prompt tokens a second, so all would take minutes."""


def subset(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Those of neighbouring lengths near 30 tokens: next to no padding, which is to the peer's advantage."""
    ordered = sorted(prompts, key=len)
    starts = range(max(1, len(ordered) - SUBSET + 1))
    best = min(starts, key=lambda i: abs(sum(map(len, ordered[i : i + SUBSET])) - 30 * SUBSET))
    return [list(p) for p in ordered[best : best + SUBSET]]


def first_tokens(directory: Path, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds to all first tokens, in a fresh process without this toolkit's BLAS."""
    done = subprocess.run([sys.executable, "-m", __name__, str(directory)], input=json.dumps(list(prompts)),
                          stdout=subprocess.PIPE, text=True, check=True,
                          env=os.environ | {"TOOLKIT_BLAS": "off"})  # fmt: skip
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def main(directory: str) -> None:
    """Measure, in this process."""
    from mlx_lm import load
    from mlx_lm.generate import BatchGenerator

    model, _ = load(directory)[:2]
    prompts = json.load(sys.stdin)

    def run(batch: list[list[int]]) -> float:
        start = time.perf_counter()
        generator = BatchGenerator(model, max_tokens=1)
        generator.insert(batch)
        seen = 0
        while seen < len(batch):
            seen += len(generator.next_generated())
        return time.perf_counter() - start

    run([prompts[0][:2]])  # warm
    print(json.dumps({"seconds": run(prompts)}))


if __name__ == "__main__":
    main(sys.argv[1])
