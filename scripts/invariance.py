"""The whole matrix of batch invariance: ways to run 32 mixed requests, each compared with alone, to the bit.

Run by `make invariance`. Exits with 1 if a row differs, or if a control that must differ doesn't.
"""

from __future__ import annotations

import argparse
import json
import sys

import ways  # isort: skip # it imports toolkit, which must come before mlx

import pandas as pd
from tqdm import tqdm

from toolkit import backend
from toolkit.forward.shapes import Shapes
from toolkit.models.load import DTYPES


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2",
                        help="what toolkit takes; or tiny, or architecture (see tiny_architectures.py), "
                             "or random (weights, of the shape of Qwen3-0.6B)")  # fmt: skip
    parser.add_argument("--family", default="llama", help="of the tiny model, or the architecture")
    parser.add_argument("--changes", type=json.loads, default={}, metavar="JSON",
                        help='to its configuration, as {"head_dim": 64}')  # fmt: skip
    parser.add_argument("--dtype", default="", choices=["", *DTYPES], help="convert its weights")
    parser.add_argument("--bits", type=int, default=0, help="quantize the random model")
    parser.add_argument("--rows", type=int, default=32, help="requests")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that each generates")
    parser.add_argument("--longest", type=int, default=200, help="tokens of the longest prompt")
    options = parser.parse_args()
    setting = ways.Setting(options.model, options.family, options.changes, options.dtype, options.bits)
    model = setting.model()
    engines = ways.Engines(model)
    text = model if options.model not in ("tiny", "architecture", "random") else None
    vocab = min(256, model.vocab_size)
    batch = ways.requests(options.rows, options.tokens, options.longest, vocab, text)

    known = ways.ways(setting)
    controls = {
        # Three rows at a time: quantized kernels may agree from eight rows up whatever the rules.
        "control: no rules for shapes": lambda *a: ways.together(
            ways.Engines(model, invariant=False), *a[1:], max_rows=3
        ),
        "control: a tile of 3": lambda *a: ways.together(
            ways.Engines(model, Shapes(3, 3, 4, 128)), *a[1:], max_rows=3
        ),
        "control: a shared generator": lambda *a: ways.together(*a, policy="global"),
    }
    table = []
    with tqdm(total=1 + len(known) + len(controls), unit="way") as bar:
        bar.set_description("each alone")
        expected = ways.alone(engines, batch, {})
        bar.update()
        for name, way in {**known, **controls}.items():
            bar.set_description(name)
            table.append((name, *ways.differing(way(engines, batch, expected), expected)))
            bar.write("{}: {} rows, {} differ in tokens, {} in logprobs".format(*table[-1]), file=sys.stderr)
            bar.update()
    columns = ["way", "rows compared", "tokens differ", "logprobs differ"]
    frame = pd.DataFrame(table, columns=columns).set_index("way")
    about = backend.info()
    rules = ", ".join(f"{name} {value}" for name, value in vars(engines.forward.shapes).items() if value)
    print(f"{model.name}, {model.dtype}, {about.device_name}, BLAS {about.blas}; {rules}")
    print(f"{options.rows} requests, {options.tokens} tokens each, compared with each alone\n")
    print(frame.to_string())
    wrong = frame.loc[list(known), columns[2:]].to_numpy().any()
    blind = (frame.loc[list(controls), "logprobs differ"] == 0).any() and about.blas != "reference"
    if wrong or blind:
        print("\nFAILED: " + ("rows differ" if wrong else "a control does not differ: nothing was measured"))
    return int(wrong or blind)


if __name__ == "__main__":
    sys.exit(main())
