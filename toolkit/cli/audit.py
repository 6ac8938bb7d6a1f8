"""Audit: whether a server, or one of this toolkit's own policies, keeps its promise to seeded requests."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from ..requests import named
from . import arguments, output
from .arguments import Source, open_model
from .doctor import columns
from .render import width

if TYPE_CHECKING:
    from ..study.audit.run import Audit


def audit(args: argparse.Namespace) -> int:
    """Print the verdicts; exit 1 where the promise is broken, 3 where it could not be tested."""
    from ..study.audit.answers import Unanswered
    from ..study.audit.run import askable
    from ..study.audit.run import audit as ask

    output.check("--out", args.out, output.TABLES)
    output.check("--chart", args.chart, output.PICTURES)
    if (args.url is None) == (args.policy is None):
        raise ValueError("audit: give either the URL of a server, or --policy for an engine here")
    for name, value in [("--header", args.header), ("--extra-body", args.extra_body), ("--ca", args.ca)]:
        if value and args.url is None:
            raise ValueError(f"{name}: is for a server; an engine takes none")
    how: dict[str, Any] = {"trials": args.trials, "tokens": args.tokens, "timeout": args.timeout,
                           "progress": sys.stderr.isatty()}  # fmt: skip
    source = Source(args.prompts) if args.prompts else None
    if source:
        given = arguments.read(source)
        where = arguments.places(source, given)
        for request in named(given):
            askable(request, where[request.id])
        how["requests"] = given
    if args.url is None:
        from ..engine.engine import Engine

        model = open_model(args.model or "smollm2")
        if source:
            arguments.check(source, named(given), model)
        found = ask(Engine(model, args.policy, args.forward), **how)
    else:
        how |= {"headers": _headers(args.header), "extra_body": _fields(args.extra_body), "ca": args.ca}
        try:
            found = ask(args.url, model=args.model, **how)
        except Unanswered as error:
            output.say(str(error))
            return 3
    # First what was found: a disk may be full.
    if args.json:
        output.write(None, output.document(found.to_json()))
    else:
        print(_text(found))
    if args.out:
        output.write_table(args.out, found.to_frame())
    if args.chart:
        from ..view import show

        show(found.chart()).save(args.chart)
    if not found.complete:
        output.say("interrupted; the checks say what was found until then")
        return 130
    broken = any(check.verdict == "broken" for check in found.checks)
    promise_broken = any(check.promise and check.verdict == "broken" for check in found.checks)
    if promise_broken or (args.strict and broken):
        return 1
    return 0 if found.ok else 3


def _headers(given: list[str] | None) -> dict[str, str]:
    """`K=V` each. Values are secrets, so an error shows none."""
    pairs = [item.partition("=") for item in given or ()]
    if not all(name and equals for name, equals, _ in pairs):
        raise ValueError("--header: must be NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _fields(text: str | None) -> dict[str, Any]:
    try:
        fields = json.loads(text or "{}")
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError("--extra-body: must be a JSON object, like '{\"cache_prompt\": false}'")
    return fields


def _text(found: Audit) -> str:
    """The promise's checks, those beside it, what is broken, and why."""
    lines = [f"{found.target}: {found.trials} trials of {found.tokens} tokens", ""]
    rows = [("check", "verdict", "compared", "differing", f"first {found.unit}")]
    for check in found.checks:
        first = "" if check.first is None else str(check.first)
        wants = " (must differ)" * (check.expects == "different")
        name = f"{'' if check.promise else 'beside: '}{check.name}{wants}"
        rows.append((name, check.verdict, f"{check.compared:,}", f"{check.differing:,}", first))
    said = [f"{check.name}: {check.sentence}" for check in found.checks if check.verdict != "kept"]
    said += [f"Likely cause: {cause}." for cause in found.diagnosis]
    said += [f"Note: {note}" for note in found.notes]
    said.append(f"{found.reading[0].upper()}{found.reading[1:]}.")
    return "\n".join([*lines, columns(rows, numbers=3), "", *(_wrapped(words) for words in said)])


def _wrapped(words: str) -> str:
    return textwrap.fill(words, width(), subsequent_indent="  ", break_long_words=False)
