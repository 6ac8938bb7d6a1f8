"""Parser: every command with its arguments. Says which function runs it, as "module:function"."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from .. import __version__
from ..bench import options
from ..cohorts.plan import STRATEGIES
from .arguments import names, seeds

__all__ = ["FORWARDS", "MAX_ROWS", "POLICIES", "TOKEN_BUDGET", "parse"]

# Said again here, because the modules that have them load MLX; a test compares.
POLICIES = ("global", "reseed", "isolate", "keyed")
FORWARDS = ("packed", "padded", "sequential")
MAX_ROWS, TOKEN_BUDGET = 32, 4096

_EPILOG = """FILE holds one request a line, as JSON: {"prompt": "Yesterday I went to the", "seed": 7}; - is
standard input. Exit status: 0 done, 1 failed, 2 bad input, 130 interrupted. Environment:
TOOLKIT_BLAS=PATH|off chooses the BLAS, TOOLKIT_CACHE=DIR where models are kept, TOOLKIT_TRACEBACK=1 shows
where an error comes from."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments as values, and the `command` that they are for.

    Raises
    ------
    ValueError
        One line, where argparse would print its usage.
    SystemExit
        After --help and --version.
    """
    parser = _Parser("toolkit", "seeds in batched inference on MLX: shown, measured, fixed", epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"mlx-seed-toolkit {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(runs: str, about: str) -> _Parser:
        name = runs.partition(":")[2]
        made: _Parser = commands.add_parser(name, help=about, about=about)
        made.set_defaults(command=runs)
        return made

    _demo(command("demo:demo", "show that the last seed wins in a batch, and that keyed sampling ends it"))
    _generate(command("commands:generate", "run requests together, one JSON line out for each choice"))
    _plan(command("commands:plan", "compare ways to sort rows into cohorts, without running a model"))
    _seeds(command("commands:seeds", "a row's first token for many seeds, beside its exact distribution"))
    _matrix(command("commands:matrix", "a row's first token for its own seed and a sibling's"))
    _drift(
        command("commands:drift", "how far company moves a row's logits, and what that does to its tokens")
    )
    _audit(command("audit:audit", "whether a server keeps seeded requests the same, whatever their company"))
    _sweep(
        command("sweep:sweep", "a study for each combination of parameters, on several processes if asked")
    )
    _doctor(command("doctor:doctor", "what computes here, and whether a model is batch-invariant on it"))
    options.add(command("bench:bench", "speed and equal bits, side by side with mlx-lm in one run"))
    _fetch(command("commands:fetch", "download a model into the cache and say where it is"))
    args = parser.parse_args(argv)
    for out in ("out", "chart"):
        _apart(f"--{out}", getattr(args, out, None), getattr(args, "file", None))
        _apart(f"--{out}", getattr(args, out, None), getattr(args, "prompts", None))
    return args


def _apart(flag: str, out: str | None, read: str | None) -> None:
    """Refuse to write where the input is read."""
    if out and read and os.path.exists(out) and os.path.exists(read) and os.path.samefile(out, read):
        raise ValueError(f"{flag} {out}: is the input, which would be gone; name another file")


class _Parser(argparse.ArgumentParser):
    def __init__(self, prog: str, about: str, **options: Any):
        # A prefix of an option would stop working when another one is added.
        super().__init__(prog, description=about[0].upper() + about[1:] + ".", allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")

    def option(self, flag: str, metavar: str, help: str, **how: Any) -> None:
        self.add_argument(flag, metavar=metavar, help=help, **how)

    def file(self, help: str = "requests as JSON lines; - is standard input") -> None:
        self.add_argument("file", metavar="FILE", help=help)

    def model(self, default: str | None = "smollm2", note: str = "") -> None:
        help = f"{note}smollm2, tiny, a directory, a .gguf file or a Hub id"
        self.option("--model", "M", help, default=default)

    def engine(self) -> None:
        self.add_argument("--forward", choices=FORWARDS, default="packed", help="(%(default)s)")
        self.add_argument("--planner", choices=STRATEGIES, help="(packed; runs for the other forwards)")
        flag, help = (
            argparse.BooleanOptionalAction,
            "insist on batch invariance, or run without (if it holds)",
        )
        self.add_argument("--invariant", action=flag, default="auto", help=help)

    def caps(self, of: str) -> None:
        self.option("--max-rows", "N", f"most rows {of} (%(default)s)", type=int, default=MAX_ROWS)
        help = f"most tokens {of}; 0 is no cap (%(default)s)"
        self.option("--token-budget", "N", help, type=int, default=TOKEN_BUDGET)

    def study(self, policies: str, own: str) -> None:
        self.file()
        self.model()
        self.option("--row", "ID", "the row that is looked at (the first)")
        help = f"its seeds: 1,2,3 or start:stop or start:stop:step ({own})"
        self.option("--seeds", "SEEDS", help, type=seeds, default=seeds(own))
        read = names("policy", POLICIES)
        help = f"any of {', '.join(POLICIES)}, with commas between, or all ({policies})"
        self.option("--policy", "P", help, type=read, default=read(policies))
        self.engine()
        self.add_argument("--json", action="store_true", help="the table as JSON lines")
        self.option("--out", "FILE", "the table, as .parquet, .csv or .jsonl")
        self.option("--chart", "FILE", "the picture, as .png, .svg or .html")


def _demo(parser: _Parser) -> None:
    parser.model()
    help = "the picture, as .png, .svg or .html, or a directory for seed_matrix.png (here)"
    parser.option("--out", "PATH", help, default=".")


def _generate(parser: _Parser) -> None:
    parser.file()
    parser.model()
    parser.add_argument("--policy", choices=POLICIES, default="keyed", help="(%(default)s)")
    parser.engine()
    parser.caps("in a step")
    parser.option("--out", "FILE", "the lines; a table of tokens if it ends in .csv or .parquet")


def _plan(parser: _Parser) -> None:
    parser.file('requests, {"length": 12} lines, or a CSV with ContextTokens; - is standard input')
    parser.model(note="counts the tokens of text: ")
    read = names("planner", STRATEGIES)
    help = f"any of {', '.join(STRATEGIES)}, with commas between (all)"
    parser.option("--planner", "P", help, type=read, default=read("all"))
    parser.caps("in a cohort")
    parser.add_argument("--json", action="store_true", help="the totals as one JSON document")
    parser.option("--out", "FILE", "every row's cohort, as .parquet, .csv or .jsonl")


def _seeds(parser: _Parser) -> None:
    parser.study("keyed", "0:200")


def _matrix(parser: _Parser) -> None:
    parser.study("global,keyed", "0:8")
    parser.option("--sibling", "ID", "the row whose seeds go along (the last)")
    parser.option("--sibling-seeds", "SEEDS", "as --seeds (0:8)", type=seeds, default=seeds("0:8"))


def _drift(parser: _Parser) -> None:
    parser.file()
    parser.model()
    parser.option("--row", "ID", "the row that is looked at (the first); the others are its company")
    help = "a token is drawn for each: 1,2,3 or start:stop or start:stop:step (0:200)"
    parser.option("--seeds", "SEEDS", help, type=seeds, default=seeds("0:200"))
    help = "multiply every difference before it is compared or reported (%(default)s)"
    parser.option("--amplify", "X", help, type=float, default=1.0)
    parser.add_argument("--json", action="store_true", help="the table as JSON lines")
    parser.option("--out", "FILE", "the table, as .parquet, .csv or .jsonl")
    parser.option("--chart", "FILE", "the picture, as .png, .svg or .html")


def _audit(parser: _Parser) -> None:
    help = (
        "base URL of a server with OpenAI's /v1/completions, or the whole of its /v1/chat/completions; left "
        "out, --policy says what is audited here"
    )
    parser.add_argument("url", metavar="URL", nargs="?", help=help)
    help = "the model as the server calls it; with --policy, one as for generate (smollm2)"
    parser.option("--model", "M", help)
    parser.add_argument(
        "--policy", choices=POLICIES, help="audit an engine of this toolkit, without a server"
    )
    parser.add_argument("--forward", choices=FORWARDS, default="packed", help="of that engine (%(default)s)")
    parser.option("--prompts", "FILE", "requests to ask with, as JSON lines (four of its own)")
    parser.option("--trials", "N", "rounds, each with other seeds (%(default)s)", type=int, default=3)
    parser.option("--tokens", "N", "length of each answer (%(default)s)", type=int, default=8)
    parser.option("--timeout", "S", "seconds to wait for an answer (%(default)g)", type=float, default=60.0)
    help = "a header for every request, its value masked in whatever is printed; may be given again"
    parser.option("--header", "K=V", help, action="append")
    parser.option("--extra-body", "JSON", "fields for every request's body, as a JSON object")
    parser.option("--ca", "FILE", "certificates that the server's must be signed by")
    parser.add_argument(
        "--strict", action="store_true", help="exit 1 also where something beside the promise is broken"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.option("--out", "FILE", "every pair of answers, as .parquet, .csv or .jsonl")
    parser.option("--chart", "FILE", "the picture, as .png, .svg or .html")


def _sweep(parser: _Parser) -> None:
    parser.file()
    parser.model()
    studies = ("first-tokens", "matrix", "drift")
    parser.add_argument("--study", choices=studies, required=True, help="as seeds, matrix and drift ask it")
    help = (
        "values of one parameter; give more for all their combinations: policy=global,keyed temperature=0.7,1"
    )
    parser.option("--grid", "NAME=V,V", help, action="append", required=True)
    parser.option("--row", "ID", "the row that is looked at (the first)")
    parser.option("--sibling", "ID", "for matrix: the row whose seeds go along (the last)")
    help = "its seeds: 1,2,3 or start:stop or start:stop:step (0:200; for matrix 0:8)"
    parser.option("--seeds", "SEEDS", help, type=seeds)
    parser.option("--sibling-seeds", "SEEDS", "as --seeds (0:8)", type=seeds, default=seeds("0:8"))
    help = "processes of ipyparallel to start for it; 0 is this one (%(default)s)"
    parser.option("--engines", "N", help, type=int, default=0)
    parser.add_argument("--json", action="store_true", help="the table as JSON lines")
    help = "the table, as .parquet, .csv or .jsonl; interrupted, the same command goes on"
    parser.option("--out", "FILE", help)
    parser.option("--chart", "FILE", "the picture, as .png, .svg or .html")


def _doctor(parser: _Parser) -> None:
    parser.model(None, "probed too, exit 1 if invariance can't be promised: ")
    parser.add_argument("--fresh", action="store_true", help="measure again, even where a verdict is cached")
    parser.add_argument("--json", action="store_true", help="one JSON document")


def _fetch(parser: _Parser) -> None:
    help = "smollm2, or a Hub id (%(default)s)"
    parser.add_argument("model", metavar="MODEL", nargs="?", default="smollm2", help=help)
