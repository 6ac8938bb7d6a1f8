"""First tokens of six mixed prompts: this toolkit against mlx-lm's BatchGenerator, one run, fresh processes.

    python benchmarks/first_tokens.py [--repeats 3] [--json]

Time from handing over 15, 50, 13, 100, 7 and 64 prompt tokens until the last of six first tokens is known, on
SmolLM2 in fp32, greedy, so that all must agree on the tokens. "As installed" is mlx-lm without this toolkit,
with the BLAS that MLX brings: about half a minute a run, so that one is run once. Ratios are of wall time;
"processor" is that of all threads. Wants an idle machine: MKL's threads wait for each other, the bundled
BLAS has one. Exit 1 where the padded forward is less than 15 times as fast.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

LENGTHS = (15, 50, 13, 100, 7, 64)
TARGET = 15
PEER, BOUND = "mlx-lm as installed", "mlx-lm, BLAS bound"
KINDS = {PEER: "peer", BOUND: "bound", "toolkit, padded": "padded", "toolkit, packed": "packed"}
TEXT = Path(__file__).parents[1] / "data" / "encyclopaedic.txt"


def prompts(encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Token ids of prompts of those lengths, cut from one text."""
    ids = encode(TEXT.read_text())
    ids = ids * (1 + sum(LENGTHS) // len(ids))
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


def peer(directory: str) -> tuple[Callable[[list[list[int]]], list[int]], Callable[[str], list[int]]]:
    """mlx-lm's own batching, as its `batch_generate` uses it."""
    from mlx_lm import load
    from mlx_lm.generate import BatchGenerator

    model, tokenizer = load(directory)

    def run(batch: list[list[int]]) -> list[int]:
        generator = BatchGenerator(model, max_tokens=1)
        uids = generator.insert(batch)
        first: dict[int, int] = {}
        while len(first) < len(batch):
            first.update({r.uid: r.token for r in generator.next_generated()})
        generator.close()
        return [first[uid] for uid in uids]

    return run, tokenizer.encode


def ours(forward: str) -> tuple[Callable[[list[list[int]]], list[int]], Callable[[str], list[int]]]:
    import toolkit as tk

    model = tk.load("smollm2", progress=False)

    def run(batch: list[list[int]]) -> list[int]:
        requests = [tk.Request(tokens=ids, temperature=0, max_tokens=1) for ids in batch]
        return [c.tokens[0] for c in tk.generate(model, requests, forward=forward)]

    return run, model.encode


def worker(kind: str, directory: str, repeats: int) -> None:
    """Measure one kind in this process."""
    if kind == "bound":
        import toolkit  # noqa: F401  (binds the BLAS)
    run, encode = peer(directory) if kind in ("peer", "bound") else ours(kind)
    batch = prompts(encode)
    run([batch[4]])  # warm: the shortest, twice over for what compiles on first use
    if kind != "peer":
        run(batch)
    times, works, tokens = [], [], []
    for _ in range(1 if kind == "peer" else repeats):
        start, work = time.perf_counter(), time.process_time()
        tokens = run(batch)
        times.append(time.perf_counter() - start)
        works.append(time.process_time() - work)
    median = statistics.median
    print(json.dumps({"seconds": median(times), "processor_seconds": median(works), "tokens": tokens}))


def measure(kind: str, directory: str, repeats: int) -> dict:
    command = [sys.executable, __file__, "--worker", kind, "--model", directory, "--repeats", str(repeats)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.model, given.repeats)
        return 0

    from toolkit import backend
    from toolkit.models.fetch import fetch

    directory, results = str(fetch("smollm2")), {}
    for name, kind in KINDS.items():
        results[name] = measure(kind, directory, given.repeats)
        results[name]["prompt_tokens_per_second"] = sum(LENGTHS) / results[name]["seconds"]
        for over, column in ((PEER, "ratio"), (BOUND, "ratio_bound")):
            if over in results:
                results[name][column] = results[over]["seconds"] / results[name]["seconds"]
    agree = len({tuple(r["tokens"]) for r in results.values()}) == 1
    reached = results["toolkit, padded"]["ratio"] >= TARGET
    if given.json:
        report = {"agree": agree, "backend": repr(backend.info()), "lengths": LENGTHS, "results": results}
        print(json.dumps(report | {"target": TARGET}, indent=2, sort_keys=True))
    else:
        print(f"{len(LENGTHS)} prompts, {sum(LENGTHS)} tokens; {backend.info()}\n")
        print(f"{'':22}{'seconds':>10}{'processor':>11}{'tokens/s':>10}{'x installed':>13}{'x bound':>10}")
        for name, r in results.items():
            bound = f"{r['ratio_bound']:>10.2f}" if "ratio_bound" in r else ""
            times = f"{r['seconds']:>10.3f}{r['processor_seconds']:>11.3f}"
            rate = f"{r['prompt_tokens_per_second']:>10.0f}{r['ratio']:>13.1f}{bound}"
            print(f"{name:22}{times}{rate}")
        same, enough = ("yes" if fact else "NO" for fact in (agree, reached))
        print(f"\nsame first tokens: {same}; padded at least {TARGET} times as fast: {enough}")
    return 0 if agree and reached else 1


if __name__ == "__main__":
    sys.exit(main())
