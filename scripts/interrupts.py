"""Interrupts: raise KeyboardInterrupt at random lines inside an engine's calls, and go on with the engine.

`python scripts/interrupts.py 1000` prints how many of 1,000 interrupts ended with every row's own bits, how
many with an engine that refuses, and lists all others, which are faults. Tests run a few tries in CI.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import toolkit as tk
from toolkit.forward import patch

HERE = str(Path(tk.__file__).parent)
RECOVERED, REFUSED = "recovered", "refused"


class Lines:
    """Counts the lines of `toolkit` that a block executes, and raises an interrupt at one of them.

    Parameters
    ----------
    at : int
        The line to raise at, counted from 1; 0 only counts.
    """

    def __init__(self, at: int = 0):
        self.at, self.count, self.where = at, 0, ""
        self._ours: dict[CodeType, bool] = {}

    def __enter__(self) -> Lines:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: Any, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code not in self._ours:
            self._ours[code] = code.co_filename.startswith((HERE, "<string>"))
        return self._line if self._ours[code] else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def requests() -> list[tk.Request]:
    """Rows of several kinds, with a prompt that is chunked, a stop string and two arrivals."""
    return [
        tk.Request("abcdefgh", id="a", seed=1, max_tokens=6),
        tk.Request("abcdxy", id="b", seed=2, max_tokens=4, n=2, top_p=0.9),
        tk.Request("zyx" * 25, id="c", seed=3, max_tokens=5, repetition_penalty=1.2),
        tk.Request("q", id="d", seed=4, max_tokens=6, logit_bias={65: 8.0, 66: 8.0}, stop=["AB"]),
        tk.Request("abcdefgh", id="e", seed=5, max_tokens=3, arrival=2, cached=2),
        tk.Request("abcdefgh", id="f", seed=6, max_tokens=8, arrival=4, priority="high", logprobs=2),
    ]


def bits(completion: tk.Completion) -> tuple[Any, ...]:
    c = completion
    return c.tokens, c.text, c.finish_reason, c.logprobs, c.margins, c.max_drift, c.top_logprobs


def one(engine: Callable[[], tk.Engine], expected: dict[Any, Any], at: int, whole: bool) -> tuple[str, str]:
    """Interrupt an engine at its line `at`, in `run` or in steps, and go on; the outcome, and where."""
    made = engine()
    done: list[tk.Completion] = []
    waiting = requests()
    with Lines(at) as lines, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            while waiting:
                made.submit(waiting[0])
                waiting.pop(0)
            if whole:
                done += made.run()
            while not made.idle:
                done += made.step()
        except KeyboardInterrupt:
            pass
        except Exception as error:  # of an engine that an earlier try has left half done
            return f"raised {type(error).__name__}: {error}", lines.where
    outcome = RECOVERED
    if patch._originals or patch._blocks:
        return "mlx-lm left patched", lines.where
    try:
        known = {row.id for row in (*made.queue, *made.running.values())} | {c.id for c in done}
        for request in waiting:
            if request.id not in known:
                made.submit(request)
        steps = 0
        while not made.idle:
            done += made.step()
            steps += 1
            if steps > 1_000:
                return "never ends", lines.where
    except RuntimeError as error:
        return (REFUSED if "make a new engine" in str(error) else f"raised {error}"), lines.where
    except Exception as error:
        return f"raised {type(error).__name__}: {error}", lines.where
    if sorted((c.id, c.choice) for c in done) != sorted(expected):
        return "rows lost or doubled", lines.where
    for c in done:
        want = expected[c.id, c.choice]
        if c.finish_reason == "cancelled" and whole:
            n = len(c.tokens)
            same = (c.tokens, c.logprobs) == (want[0][:n], want[3][:n]) or c.tokens[: len(want[0])] == want[0]
        else:
            same = bits(c) == want
        if not same:
            return "other bits", lines.where
    return outcome, lines.where


def interrupts(tries: int, seed: int = 0, policy: str = "keyed") -> tuple[Counter[str], list[str]]:
    """Outcomes of `tries` interrupts by kind, and a line for each fault."""
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    model = tk.tiny(1, num_attention_heads=2, num_key_value_heads=1, **small)
    first = tk.Engine(model)  # one forward for all: a new one is checked, which takes its time
    how: dict[str, Any] = {"max_rows": 4, "token_budget": 40, "prefix_cache": 20_000, "pipeline": True}
    how["forward"] = first.forward

    def engine() -> tk.Engine:
        return tk.Engine(model, policy=policy, **how)

    made = engine()
    for request in requests():
        made.submit(request)
    expected = {(c.id, c.choice): bits(c) for c in made.run()}
    with Lines() as lines:
        made = engine()
        for request in requests():
            made.submit(request)
        made.run()
    rng, outcomes, faults = random.Random(seed), Counter[str](), []
    for _ in range(tries):
        at, whole = rng.randint(1, lines.count), rng.random() < 0.3
        outcome, where = one(engine, expected, at, whole)
        outcomes[outcome] += 1
        if outcome not in (RECOVERED, REFUSED):
            faults.append(f"line {at} ({where}), {'run' if whole else 'steps'}: {outcome}")
    return outcomes, faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tries", nargs="?", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", default="keyed")
    given = parser.parse_args()
    outcomes, faults = interrupts(given.tries, given.seed, policy=given.policy)
    print("\n".join(faults))
    print(dict(outcomes))
    sys.exit(bool(faults))
