"""The commands that answer a question about a file of requests. Each returns an exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ..cohorts.plan import compare
from ..cohorts.read import read_rows
from ..engine.admission import check as checked
from ..requests import named
from . import arguments, output
from .arguments import Source, among, open_model
from .output import say

if TYPE_CHECKING:
    from ..requests import Request
    from ..results import Results


def generate(args: argparse.Namespace) -> int:
    """Run requests together; what the model can't take is reported and doesn't stop the others."""
    from ..engine import engine

    output.check("--out", args.out)
    source = Source(args.file)
    given = arguments.read(source)
    results = engine.generate(
        open_model(args.model), given, policy=args.policy, forward=args.forward, planner=args.planner,
        invariant=args.invariant, max_rows=args.max_rows, token_budget=args.token_budget,
        progress=sys.stderr.isatty())  # fmt: skip
    if any(completion.finish_reason == "cancelled" for completion in results):
        raise KeyboardInterrupt
    if args.out and args.out.endswith((".csv", ".parquet")):
        output.write_table(args.out, results.to_frame())
    else:
        output.write(args.out, output.lines(results.to_json()))
    return _report(results, source, given)


def _report(results: Results, source: Source, given: Sequence[Request]) -> int:
    failed = {(c.id, c.error): None for c in results if c.error}
    if failed:
        where = arguments.places(source, given)
        for id, error in failed:
            say(f"{where[id]}: {error}")
    return 2 if failed else 0


def plan(args: argparse.Namespace) -> int:
    """Compare strategies on requests, or on nothing but their lengths."""
    output.check("--out", args.out, output.TABLES)
    model = cache(lambda: open_model(args.model))  # opened for the first text, if there is one
    rows = read_rows(args.file, lambda request: checked(request, model()))
    if not rows:
        raise ValueError(f"{args.file}: no rows in it")
    compared = compare(rows, args.planner, max_rows=args.max_rows, token_budget=args.token_budget)
    if args.out:
        output.write_table(args.out, output.joined(compared.plans))
    if args.json:
        asked = {"max_rows": args.max_rows, "token_budget": args.token_budget}
        output.write(None, output.document({**asked, "rows": len(rows), "strategies": compared.to_json()}))
    elif not args.out:
        caps = [f"{n:,} {what}" for n, what in ((args.max_rows, "rows"), (args.token_budget, "tokens")) if n]
        print(f"{len(rows):,} rows" + (f", at most {' and '.join(caps)} in a cohort" if caps else ""))
        print(compared)
    return 0


def seeds(args: argparse.Namespace) -> int:
    """A row's first token for many seeds."""
    from ..study.seeds.first_token import FirstTokens, first_tokens
    from .render import first_tokens as as_text

    def ask(**how: Any) -> FirstTokens:
        return first_tokens(row=args.row, seeds=args.seeds, **how)

    def draw(made: Sequence[FirstTokens]) -> Any:
        from ..view import charts

        return charts.first_tokens(made[0].distribution, output.joined(made))

    return _study(args, 1, ask, as_text, draw)


def matrix(args: argparse.Namespace) -> int:
    """A row's first token by its own seed and a sibling's."""
    from ..study.seeds.seed_matrix import SeedMatrix, seed_matrix
    from .render import seed_matrix as as_text

    def ask(requests: Sequence[Request], **how: Any) -> SeedMatrix:
        sibling = args.sibling or next(r.id for r in reversed(requests) if r.id != args.row)
        return seed_matrix(requests=requests, row=args.row, sibling=sibling, seeds=args.seeds,
                           sibling_seeds=args.sibling_seeds, **how)  # fmt: skip

    def draw(made: Sequence[SeedMatrix]) -> Any:
        from ..view import charts

        return charts.seed_matrix(output.joined(made))

    return _study(args, 2, ask, as_text, draw)


def drift(args: argparse.Namespace) -> int:
    """A row's logits in company against its logits alone."""
    from ..study.drift.compositions import standard
    from ..study.drift.study import drift as ask

    output.check("--out", args.out, output.TABLES)
    output.check("--chart", args.chart, output.PICTURES)
    source = Source(args.file)
    requests = {r.id: r for r in named(arguments.read(source))}
    row = args.row or next(iter(requests))
    among("--row", row, requests.values())
    model = open_model(args.model)
    arguments.check(source, list(requests.values()), model)
    mine = requests.pop(row)
    company = standard(requests.values(), len(checked(mine, model))) if requests else None
    made = ask(model, mine, company, seeds=args.seeds, amplify=args.amplify, progress=sys.stderr.isatty())
    if not made.complete:
        raise KeyboardInterrupt
    _told(
        args, [made], lambda study: f"{study.reading}\n{study.to_frame().to_string(index=False)}", made.chart
    )
    return 0


def _study(args: argparse.Namespace, least: int, ask: Callable[..., Any], as_text: Callable[[Any], str],
           draw: Callable[[Any], Any]) -> int:  # fmt: skip
    """Ask a question under each policy, of one forward; print the answers or write their table."""
    from ..study.seeds.prefilled import prefill

    output.check("--out", args.out, output.TABLES)
    output.check("--chart", args.chart, output.PICTURES)
    source = Source(args.file)
    requests = named(arguments.read(source))
    if len(requests) < least:
        raise ValueError(f"{source.name}: has 1 request; a matrix needs a row and a sibling")
    args.row = args.row or requests[0].id
    among("--row", args.row, requests)
    among("--sibling", getattr(args, "sibling", None), requests)
    model = open_model(args.model)
    arguments.check(source, requests, model)
    how = {"forward": args.forward, "planner": args.planner, "invariant": args.invariant}
    # Policies don't change the logits, but isolate changes who runs with whom.
    batches = {alone: prefill(model, requests, policy="isolate" if alone else "keyed", **how)
               for alone in {policy == "isolate" for policy in args.policy}}  # fmt: skip
    made = [ask(model=model, requests=requests, policy=policy, prefilled=batches[policy == "isolate"],
                progress=sys.stderr.isatty()) for policy in args.policy]  # fmt: skip
    _told(args, made, as_text, lambda: draw(made))
    return 0


def _told(
    args: argparse.Namespace, made: Sequence[Any], as_text: Callable[[Any], str], draw: Callable[[], Any]
) -> None:
    """Answers as the table, the picture, JSON lines or text, as asked."""
    if args.out:
        output.write_table(args.out, output.joined(made))
    if args.chart:
        from ..view import show

        show(draw()).save(args.chart)
    if args.json:
        output.write_table(None, output.joined(made))
    elif not (args.out or args.chart):
        print("\n\n".join(map(as_text, made)))


def fetch(args: argparse.Namespace) -> int:
    """Have a model in the cache."""
    from ..models import fetch as models

    if args.model in models.manifest():
        print(models.fetch(args.model, progress=sys.stderr.isatty()))
    else:
        print(f"{open_model(args.model).name}: ready")
    return 0
