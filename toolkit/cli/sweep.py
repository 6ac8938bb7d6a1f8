"""Sweep: a study of a file's requests, for each combination of parameters; on several processes if asked."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..cohorts.plan import STRATEGIES
from ..engine.admission import check as checked
from ..fields import show
from ..requests import Request, named
from . import arguments, output
from .arguments import Source, among
from .output import say
from .parser import FORWARDS, POLICIES

if TYPE_CHECKING:
    import pandas as pd

    from ..models.load import Model
    from ..study.sweep.run import Sweep

_ENGINE = {"policy": POLICIES, "forward": FORWARDS, "planner": STRATEGIES,
           "invariant": {"true": True, "false": False, "auto": "auto"}}  # fmt: skip
# What can be set on all requests: numbers, but for those that a first token doesn't depend on.
_FIELDS: dict[str, Any] = {
    f.name: type(f.default) for f in fields(Request) if type(f.default) in (int, float)
}
for _name in ("n", "max_tokens", "logprobs"):
    del _FIELDS[_name]
_SEEDS = {"first-tokens": "0:200", "matrix": "0:8", "drift": "0:200"}
# A study's chart: the column, and what a point is of its rows.
_CHARTS = {"first-tokens": ("token", "nunique"), "matrix": ("token", "nunique"), "drift": ("max_abs", "max")}
_MOST_ENGINES = 256


@dataclass(frozen=True)
class FileStudy:
    """A study of some requests, as a function of a combination; any process can run it."""

    study: str
    model: str
    requests: tuple[Request, ...]
    row: str
    sibling: str
    seeds: tuple[int, ...]
    sibling_seeds: tuple[int, ...]

    @property
    def __name__(self) -> str:
        return self.study

    def __call__(self, **point: Any) -> Any:
        from ..study.drift import compositions
        from ..study.drift.study import drift
        from ..study.seeds.first_token import first_tokens
        from ..study.seeds.seed_matrix import seed_matrix

        model = _opened(self.model)
        how = {name: point.pop(name) for name in (*_ENGINE, "amplify") if name in point}
        batch = [request.replace(**point) for request in self.requests]
        if self.study == "first-tokens":
            return first_tokens(model, batch, row=self.row, seeds=self.seeds, **how)
        if self.study == "matrix":
            return seed_matrix(model, batch, row=self.row, sibling=self.sibling, seeds=self.seeds,
                                     sibling_seeds=self.sibling_seeds, **how)  # fmt: skip
        mine = next(request for request in batch if request.id == self.row)
        others = [request for request in batch if request.id != self.row]
        company = compositions.standard(others, len(checked(mine, model))) if others else None
        if "forward" in how:
            how["forwards"] = [how.pop("forward")]
        return drift(model, mine, company, seeds=self.seeds, **how)


def sweep(args: argparse.Namespace) -> int:
    """Ask a study for each combination of a grid."""
    output.check("--out", args.out, output.TABLES)
    output.check("--chart", args.chart, output.PICTURES)
    grid = _grid(args.study, args.grid)
    _engines(args.engines)
    source = Source(args.file)
    requests = named(arguments.read(source))
    study = _study(args, requests, source.name)
    from ..study.sweep.grid import combinations, said
    from ..study.sweep.run import sweep as ask

    points = combinations(grid)
    batches = [_batch(requests, point) for point in points]
    model = _opened(args.model)
    for batch in batches if "cached" in grid else batches[:1]:
        arguments.check(source, batch, model)
    with warnings.catch_warnings(), _started(args.engines) as executor:
        warnings.filterwarnings("ignore", message="interrupted: ")
        made = ask(study, grid, executor, out=args.out, progress=sys.stderr.isatty())
    if len(made.missing):
        left = bool(args.out) and Path(f"{args.out}.cells").is_dir()
        kept = f"; they are kept in {args.out}.cells, and the same command goes on" if left else ""
        done = len(points) - len(made.missing)
        say(f"interrupted: {done} of {len(points)} cells are done{kept}")
        return 130
    _told(args, made, list(grid))
    for line in made.failed.to_dict("records"):
        error = line.pop("error")
        say(f"{said(line)}: {error}")
    return 1 if len(made.failed) else 0


def _grid(study: str, given: Sequence[str]) -> dict[str, list[Any]]:
    """What --grid says: values by name, each once."""
    grid: dict[str, list[Any]] = {}
    own = ("forward", "amplify") if study == "drift" else tuple(_ENGINE)
    for text in given:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ValueError(f"--grid {show(text)}: must be like policy=global,keyed or temperature=0.7,1")
        if name not in own and name not in _FIELDS:
            rule = f"must be one of {', '.join(own)} for {study}, or of a request's {', '.join(_FIELDS)}"
            raise ValueError(f"--grid {show(text)}: {rule}")
        if name in grid:
            raise ValueError(f"--grid {show(text)}: {name} is there twice; give all its values at once")
        grid[name] = list(dict.fromkeys(_value(name, value) for value in values.split(",")))
    return grid


def _value(name: str, text: str) -> Any:
    """One value of --grid."""
    if name in _ENGINE:
        allowed = _ENGINE[name]
        if text not in allowed:
            raise ValueError(f"--grid {name}={show(text)}: must be one of {', '.join(allowed)}")
        return allowed[text] if isinstance(allowed, Mapping) else text
    kind = _FIELDS.get(name, float)
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(
            f"--grid {name}={show(text)}: must be {'an integer' if kind is int else 'a number'}"
        ) from None
    if name == "amplify":
        if not 0 < value < float("inf"):
            raise ValueError(f"--grid {name}={show(text)}: must be a positive number; 1 changes nothing")
        return value
    try:
        Request("", **{name: value})
    except ValueError as error:
        raise ValueError(f"--grid {error}") from None
    return value


def _engines(count: int) -> None:
    """Refuse a number of engines that can't be had."""
    if not 0 <= count <= _MOST_ENGINES:
        raise ValueError(
            f"--engines {count}: must be in [0, {_MOST_ENGINES}]; 0 runs all cells in this process"
        )
    if count and importlib.util.find_spec("ipyparallel") is None:
        advice = 'pip install "mlx-seed-toolkit[distributed]"'
        raise ValueError(f"--engines {count}: needs ipyparallel ({advice}); 0 doesn't")


def _study(args: argparse.Namespace, requests: Sequence[Request], file: str) -> FileStudy:
    row = args.row or requests[0].id
    among("--row", row, requests)
    among("--sibling", args.sibling, requests)
    sibling = args.sibling or next((r.id for r in reversed(requests) if r.id != row), "")
    if args.study == "matrix" and not sibling:
        raise ValueError(f"{file}: has 1 request; a matrix needs a row and a sibling")
    if args.study == "matrix" and row == sibling:
        raise ValueError(f'--sibling "{sibling}": must be another row than --row')
    seeds = args.seeds or arguments.seeds(_SEEDS[args.study])
    return FileStudy(
        args.study, args.model, tuple(requests), row, sibling, tuple(seeds), tuple(args.sibling_seeds)
    )


def _batch(requests: Sequence[Request], point: Mapping[str, Any]) -> list[Request]:
    changes = {name: value for name, value in point.items() if name in _FIELDS}
    try:
        return [request.replace(**changes) for request in requests]
    except ValueError as error:
        raise ValueError(f"--grid {error}") from None


@cache
def _opened(name: str) -> Model:
    """The model, once in each process."""
    return arguments.open_model(name)


@contextmanager
def _started(count: int) -> Iterator[Any]:
    """A client of `count` engines on this machine, which end with it; None if `count` is 0."""
    if not count:
        yield None
        return
    from ipyparallel import Cluster

    with tempfile.TemporaryDirectory() as profile:
        cluster = Cluster(n=count, profile_dir=profile, log_level=50)
        try:
            client = cluster.start_and_connect_sync(activate=False)
            try:
                yield client
            finally:
                client.close()
        finally:
            cluster.stop_cluster_sync()


def _told(args: argparse.Namespace, made: Sweep, names: list[str]) -> None:
    frame = made.to_frame()
    if args.chart and len(frame):
        from ..view import show as shown

        y, how = _CHARTS[args.study]
        shown(made.chart(y, how=how)).save(args.chart)
    if args.json:
        output.write(None, files.table(frame, ".jsonl"))  # in full: a grid's values need not be float32
    elif not (args.out or args.chart) and len(frame):
        print(_summary(args.study, frame, names).to_string(index=False))


def _summary(study: str, frame: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """A line for each combination."""
    import pandas as pd

    from ..study.seeds.seed_matrix import SeedMatrix
    from ..token_labels import labels

    lines = []
    for point, part in frame.groupby(names, sort=False):
        line = dict(zip(names, point, strict=True))
        if study == "matrix":
            policy, row, sibling = part[["policy", "row", "sibling"]].iloc[0]
            lines.append(line | {"reading": SeedMatrix(policy, row, sibling, part).reading})
            continue
        if study == "drift":
            equal, tokens = int((part["max_abs"] == 0).sum()), int(part["draws"].sum())
            found = {"runs": len(part), "with equal bits": equal, "largest": f"{part['max_abs'].max():.2g}"}
            lines.append(line | found | {"draws": tokens, "tokens changed": int(part["flips"].sum())})
            continue
        counts = part["token"].value_counts()
        common = part[part["token"] == counts.index[0]].iloc[0]
        word = labels([common["token"]], [common["text"]], limit=24)[0]
        many = {"seeds": len(part), "distinct tokens": len(counts), "commonest": word}
        lines.append(
            line | many | {"drawn": int(counts.iloc[0]), "expected": round(common["p"] * len(part), 1)}
        )
    return pd.DataFrame(lines)
