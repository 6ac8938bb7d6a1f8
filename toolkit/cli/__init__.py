"""Command line: `toolkit demo`, `generate`, `matrix`, `sweep`, `audit`...; `toolkit --help` lists them all.

Here whatever goes wrong becomes one line and an exit status: 2 for bad input, 1 for a disk or a network that
fails (and for a promise that doesn't hold, where a command checks one), 130 for Ctrl-C. `parser` has the
arguments; what a command does is in `commands` or a module of its own name, loaded when it's called.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from .. import backend
from ..fields import interrupted
from .output import say
from .parser import parse

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; the process's own if left out.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal's encoding may lack a character of the output
            stream.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            # Interrupted, an engine hands out what it has; a command writes all or nothing.
            warnings.filterwarnings("ignore", message="interrupted: unfinished requests")
            status = _run(argv)
        sys.stdout.flush()  # here, where a full disk or a closed pipe can still be told
        return status
    except KeyboardInterrupt:
        say("interrupted; nothing was written")
        return 130
    except BrokenPipeError:
        # Whoever read the output has seen enough. Python flushes once more at exit: give it a place.
        _drop_output()
        return 141
    except Exception as error:
        if interrupted(error):
            say("interrupted; nothing was written")
            return 130
        if os.environ.get("TOOLKIT_TRACEBACK") or not isinstance(error, ValueError | OSError):
            raise
        say(_message(error))
        if isinstance(error, OSError):
            _drop_output()
            return 1
        return 2


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = parse(argv)
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    backend.bind()
    module, _, function = args.command.partition(":")
    command: Callable[[argparse.Namespace], int] = getattr(import_module(f".{module}", __name__), function)
    return command(args)


def _message(error: ValueError | OSError) -> str:
    if isinstance(error, ValueError) or not error.strerror:  # a FetchError is both, and says it all
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    say(f"warning: {message}")


def _drop_output() -> None:
    """Let Python's last flush of standard output, at exit, succeed: what went wrong has been told."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
