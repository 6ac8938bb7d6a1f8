"""Demo: the whole story on one screen. Two requests in one batch, and whose seed decides."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from . import output
from .arguments import open_model

if TYPE_CHECKING:
    from ..study.seeds.seed_matrix import SeedMatrix

# Prompts after which a model is unsure (the likeliest next token has 5 and 8 %): seeds show only then.
PROMPTS = {"A": "The children were playing with a", "B": "Yesterday I went to the"}
SEEDS = range(8)
_NEXT = """Next: `make lab` opens the notebooks, which take this apart step by step;
`toolkit generate FILE` runs requests of your own; `toolkit --help` lists the rest."""


def demo(args: argparse.Namespace) -> int:
    """Print the seed matrix under `global` and `keyed`, and write both as a picture."""
    picture = Path(args.out) / "seed_matrix.png" if Path(args.out).is_dir() else Path(args.out)
    output.check("--out", str(picture), output.PICTURES)
    from .. import backend
    from ..requests import Request
    from ..study.seeds.prefilled import prefill
    from ..study.seeds.seed_matrix import seed_matrix
    from ..view import charts, show
    from . import render

    model = open_model(args.model)
    print(f"One batch of two requests, run by {model.name} on this {backend.info().device.upper()}:")
    for id, prompt in PROMPTS.items():
        print(f'  {id}  "{prompt}"')
    print("Each table shows A's first token, for eight seeds of its own (down) and eight of B's (along).\n")
    requests = [Request(prompt, id=id, seed=0) for id, prompt in PROMPTS.items()]
    # One composition, one forward: invariance is not in question, so a first run need not wait for its probe.
    batch = prefill(model, requests, invariant=False)

    def ask(policy: str) -> SeedMatrix:
        return seed_matrix(model, requests, row="A", sibling="B", seeds=SEEDS, sibling_seeds=SEEDS,
                           policy=policy, prefilled=batch)  # fmt: skip

    made = [ask("global"), ask("keyed")]
    for matrix in made:
        print(render.seed_matrix(matrix), end="\n\n", flush=True)
    show(charts.seed_matrix(output.joined(made))).save(picture)
    print(f"Both tables as a picture: {picture}")
    print(_NEXT)
    return 0
