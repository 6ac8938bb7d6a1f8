"""Ways to run the same requests that must give the same tokens and the same logprobs, to the bit.

`test_invariance` runs a part of the matrix, `scripts/invariance.py` all of it. Run as a script, this imports
rows that another process exported, and prints what becomes of them.
"""

from __future__ import annotations

import toolkit as tk  # isort: skip # it binds the BLAS, which must come before mlx

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tiny_architectures

from toolkit.bench import workloads
from toolkit.forward.packed import PackedForward
from toolkit.forward.shapes import Shapes
from toolkit.models.dtype import convert
from toolkit.models.load import DTYPES

Row = tuple[str, int]
Line = tuple[tuple[int, ...], tuple[float | None, ...]]
Lines = dict[Row, Line]

TEXT = (
    "The children were playing with a wooden boat that their grandfather had carved one winter, and when the "
    "wind was kind they let it go as far as the old bridge. Yesterday I went to the market with my sister. "
    "In the middle of the night the old man heard a sound that he had not heard for many years. My favourite "
    "thing is to walk along the river before anyone else is awake. "
)


@dataclass(frozen=True)
class Setting:
    """A model by name.

    Parameters
    ----------
    name : str
        What `toolkit.load` takes; "tiny"; "architecture", what `tiny_architectures` builds of a family;
        or "random", random weights of the shape of Qwen3-0.6B.
    family : str
        Of a tiny model, or an architecture.
    changes : dict
        To a tiny model's or an architecture's configuration.
    dtype : str
        Convert a tiny model's or an architecture's weights; the default leaves them.
    bits : int
        Quantize the random model; 0 doesn't.
    """

    name: str = "smollm2"
    family: str = "llama"
    changes: dict[str, Any] = field(default_factory=dict, hash=False)
    dtype: str = ""
    bits: int = 0

    def model(self) -> tk.Model:
        if self.name == "random":
            return workloads.random_qwen3(self.bits)
        if self.name == "tiny":
            made = tk.tiny(1, model_type=self.family, **self.changes)
        elif self.name == "architecture":
            vocab = tiny_architectures.VOCAB
            module = tiny_architectures.build(self.family, **self.changes)
            config = {**tiny_architectures.config(self.family), **self.changes}
            made = tk.Model(self.family, module, workloads.Numbers(vocab), vocab, None, frozenset(),
                            config, "float32")  # fmt: skip
        else:
            return tk.load(self.name)
        if not self.dtype:
            return made
        convert(made.module, DTYPES[self.dtype], dequantize=False, progress=False)
        return replace(made, dtype=self.dtype)


class Engines:
    """Makes engines of one model; their forward is made once."""

    def __init__(self, model: tk.Model, shapes: Shapes | None = None, invariant: bool = True):
        self.model = model
        first = tk.Engine(model, invariant=invariant and shapes is None)
        self.forward = first.forward if shapes is None else PackedForward(model, shapes)

    def __call__(self, requests: Iterable[tk.Request] = (), policy: str = "keyed", **how) -> tk.Engine:
        made = tk.Engine(self.model, policy, invariant=False, **how)
        made.forward = self.forward
        for request in requests:
            made.submit(request)
        return made


def requests(
    count: int, tokens: int, longest: int, vocab: int, model: tk.Model | None = None
) -> list[tk.Request]:
    """Mixed requests: lengths from one token up, three temperatures, with and without filters and penalties.

    Parameters
    ----------
    count, tokens : int
        How many, and how many tokens each generates.
    longest : int
        Tokens of the longest prompt.
    vocab : int
        Prompts are ids below this, unless a `model` is given to encode text.
    """
    rng = random.Random(7)
    filters = [
        {},
        {"top_p": 0.9},
        {"repetition_penalty": 1.2},
        {"top_k": 40, "min_p": 0.02},
        {"presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"typical_p": 0.95, "logprobs": 3},
        {"xtc_probability": 0.5, "xtc_threshold": 0.05},
        {"top_n_sigma": 2.0},
    ]
    text = model.encode(TEXT * 8) if model is not None else []
    made = []
    for i in range(count):
        length = 1 + int((longest - 1) * (i / max(1, count - 1)) ** 2)
        start = rng.randrange(100)
        ids = text[start : start + length] or [rng.randrange(vocab) for _ in range(length)]
        temperature = (1.0, 0.7, 0.0)[i % 3]
        fields = {
            "temperature": temperature,
            "seed": 1000 + i,
            "max_tokens": tokens,
            **filters[i % len(filters)],
        }
        made.append(tk.Request(id=f"r{i}", tokens=ids, **fields))
    rng.shuffle(made)
    return made


def lines(done: Iterable[tk.Completion]) -> Lines:
    """What is compared."""
    return {(c.id, c.choice): (c.tokens, c.logprobs) for c in done}


def differing(got: Lines, expected: Lines) -> tuple[int, int, int]:
    """Rows compared, rows with other tokens, rows with other logprobs."""
    tokens = sum(got[row][0] != expected[row][0] for row in got)
    logprobs = sum(got[row][1] != expected[row][1] for row in got)
    return len(got), tokens, logprobs


# The ways. Each takes engines, requests and what is expected of them, and gives what it got.


def alone(engines: Engines, batch: Sequence[tk.Request], expected: Lines) -> Lines:
    return {row: line for one in batch for row, line in lines(engines([one]).run()).items()}


def together(engines: Engines, batch: Sequence[tk.Request], expected: Lines, **how) -> Lines:
    return lines(engines(batch, **how).run())


def permuted(engines: Engines, batch: Sequence[tk.Request], expected: Lines) -> Lines:
    order = list(batch)
    random.Random(3).shuffle(order)
    return together(engines, order, expected, token_budget=0)


def adopted(engines: Engines, batch: Sequence[tk.Request], expected: Lines, **how) -> Lines:
    some = [r.replace(cached=(len(r.tokens) - 1) // 2) if i % 2 else r for i, r in enumerate(batch)]
    return together(engines, some, expected, **how)


def arriving(engines: Engines, batch: Sequence[tk.Request], expected: Lines) -> Lines:
    rng = random.Random(4)
    return together(engines, [r.replace(arrival=rng.randrange(20)) for r in batch], expected)


def siblings_cancelled(engines: Engines, batch: Sequence[tk.Request], expected: Lines) -> Lines:
    engine, gone = engines(batch), [r.id for r in batch[::3]]

    def cancel(step: int) -> None:
        running = {row.id for row in engine.running.values()}
        if step % 2 and gone and gone[-1] in running:
            engine.cancel(gone.pop())

    done = _stepped(engine, batch, cancel)
    # Those that were cancelled have the beginning of what they would have had.
    return {row: line if len(line[0]) == len(expected[row][0]) else _rest(line, expected[row])
            for row, line in done.items()}  # fmt: skip


def preempted(engines: Engines, batch: Sequence[tk.Request], expected: Lines) -> Lines:
    engine, rng = engines(batch, token_budget=48), random.Random(5)

    def preempt(step: int) -> None:
        running = sorted({row.id for row in engine.running.values()})
        if step % 3 == 1 and running:
            engine.preempt(rng.choice(running))

    return _stepped(engine, batch, preempt)


def prefix_cached(engines: Engines, batch: Sequence[tk.Request], expected: Lines) -> Lines:
    engine = engines(batch, prefix_cache=1 << 28)
    engine.run()
    for request in batch:
        engine.submit(request)
    done = engine.run()
    assert sum(c.cached > 0 for c in done) >= len(batch) // 2, "the cache was not used"
    return lines(done)


def resumed(engines: Engines, batch: Sequence[tk.Request], expected: Lines) -> Lines:
    some = [r.replace(generated=expected[r.id, 0][0][: _part(r)]) for r in batch]
    return {row: _rest(line, expected[row]) for row, line in together(engines, some, expected).items()}


def sent_again(engines: Engines, batch: Sequence[tk.Request], expected: Lines) -> Lines:
    """Prompt and first tokens as a new prompt, where no penalty tells them apart."""
    some = []
    for r in batch:
        if not (r.presence_penalty or r.frequency_penalty):
            ids = [*r.tokens, *expected[r.id, 0][0][: _part(r)]]
            some.append(r.replace(tokens=ids, max_tokens=r.max_tokens - len(ids) + len(r.tokens)))
    return {row: _rest(line, expected[row]) for row, line in together(engines, some, expected).items()}


def moved(engines: Engines, batch: Sequence[tk.Request], expected: Lines, setting: Setting) -> Lines:
    """Every other row goes to another process after a few steps."""
    engine = engines(batch)
    done = lines(c for _ in range(5) for c in engine.step())
    rows = [r.id for r in batch[::2] if (r.id, 0) not in done]
    with tempfile.TemporaryDirectory() as directory:
        for id in rows:
            engine.export_row(id, Path(directory) / f"{id}.safetensors")
        about = json.dumps([asdict(setting), asdict(engines.forward.shapes), directory])
        there = subprocess.run([sys.executable, __file__, about], capture_output=True, text=True)
        assert there.returncode == 0, there.stderr
    done |= lines(engine.run())
    for id, choice, tokens, logprobs in json.loads(there.stdout):
        done[id, choice] = tuple(tokens), tuple(logprobs)
    assert len(done) == len(batch)
    return done


def _stepped(engine: tk.Engine, batch: Sequence[tk.Request], act: Callable[[int], None]) -> Lines:
    """Run to the end, with something done after each of the first steps."""
    done: list[tk.Completion] = []
    for step in range(max(r.max_tokens for r in batch) - 1):
        done += engine.step()
        act(step)
    return lines([*done, *engine.run()])


def _part(request: tk.Request) -> int:
    return max(1, request.max_tokens // 3)


def _rest(line: Line, whole: Line) -> Line:
    """A line that is a part of the whole, at its end or at its beginning, made whole."""
    (tokens, logprobs), n = line, len(line[0])
    if n and whole[0][:n] == tokens and whole[1][:n] == logprobs:
        return whole
    return (*whole[0][: len(whole[0]) - n], *tokens), (*whole[1][: len(whole[1]) - n], *logprobs)


def ways(setting: Setting) -> dict[str, Callable[[Engines, Sequence[tk.Request], Lines], Lines]]:
    """Every way by name."""
    return {
        "one cold batch": lambda *a: together(*a, token_budget=0),
        "permuted": permuted,
        "half of them adopted": adopted,
        "adopted rows split off": lambda *a: adopted(*a, planner="runs"),
        "grouped by length": lambda *a: together(*a, planner="by-length"),
        "token budget 64": lambda *a: together(*a, token_budget=64),
        "token budget 256": lambda *a: together(*a, token_budget=256),
        "token budget 4,096": lambda *a: together(*a, token_budget=4096),
        "three rows at a time": lambda *a: together(*a, max_rows=3),
        "arriving at random steps": arriving,
        "siblings cancelled midway": siblings_cancelled,
        "preempted and resumed": preempted,
        "moved to another process": lambda *a: moved(*a, setting=setting),
        "prefix cache on": prefix_cached,
        "resumed with generated=": resumed,
        "sent again with first tokens": sent_again,
        "pipelined": lambda *a: together(*a, pipeline=True, token_budget=64),
    }


def import_and_run(about: str) -> None:
    """What the other process does."""
    setting, shapes, directory = json.loads(about)
    shapes["skip"] = tuple(shapes["skip"])
    engine = Engines(Setting(**setting).model(), Shapes(**shapes))()
    for path in sorted(Path(directory).iterdir()):
        engine.import_row(path)
    json.dump([[c.id, c.choice, c.tokens, c.logprobs] for c in engine.run()], sys.stdout)


if __name__ == "__main__":
    import_and_run(sys.argv[1])
