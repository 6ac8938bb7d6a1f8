"""Options of `toolkit bench`. Loads nothing that the command line doesn't have already."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

GROUPS = ("prefill", "decode", "rules", "trace", "draw", "installed", "bits", "bits-4bit")
ALWAYS = ("prefill", "decode", "rules", "trace", "draw", "installed")
GPU_SUITE = ("prefill", "decode", "draw", "rules", "bits", "bits-4bit")
TRACE = Path(__file__).parents[3] / "shared" / "data" / "azure_conversation_lengths.csv"


def add(parser: argparse.ArgumentParser) -> None:
    """Add them to a parser."""

    def option(flag: str, metavar: str, help: str, **how: object) -> None:
        parser.add_argument(flag, metavar=metavar, help=help, **how)  # type: ignore[arg-type]

    option("--model", "M", "the model (smollm2; on a GPU random weights of the shape of Qwen3-0.6B)")
    option("--only", "NAME", f"any of {', '.join(GROUPS)}, with commas between", type=groups)
    parser.add_argument(
        "--quick", action="store_true", help="everything small: does it run? Times mean little"
    )
    parser.add_argument("--gpu-suite", action="store_true",
                        help=f"{', '.join(GPU_SUITE)}, small enough for --limit 170")  # fmt: skip
    option("--limit", "SECONDS", "start nothing new after this long", type=seconds, default=math.inf)
    option("--rounds", "N", "rounds that count, after one that warms (3)", type=count)
    option("--requests", "N", "requests of the invariance matrix (32)", type=count)
    option("--token-budget", "N", "tokens a step of the prefill (4096; on a GPU 8192)", type=count)
    option("--trace", "FILE", "prompt lengths, as toolkit plan reads them", default=None)
    parser.add_argument("--json", action="store_true", help="one JSON document; figures go to standard error")


def groups(text: str) -> tuple[str, ...]:
    """Reads names of groups."""
    given = tuple(dict.fromkeys(text.split(",")))
    for name in given:
        if name not in GROUPS:
            raise argparse.ArgumentTypeError(f"name {name!r}: must be one of {', '.join(GROUPS)}")
    return given


def count(text: str) -> int:
    """Reads a number that is at least 1."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least 1")
    return int(text)


def seconds(text: str) -> float:
    """Reads a number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of seconds, above 0")
    return value
