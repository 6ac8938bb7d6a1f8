"""Doctor: what computes here, for people and for bug reports; with a model, what may be promised of it."""

from __future__ import annotations

import argparse
import platform

from .. import __version__, backend
from . import output


def doctor(args: argparse.Namespace) -> int:
    """Print the backend."""
    rows = dict(backend.info().rows())
    rows |= {"python": platform.python_version(), "system": platform.platform(), "toolkit": __version__}
    if args.json:
        output.write(None, output.document({name.replace(" ", "_"): value for name, value in rows.items()}))
    else:
        wide = max(map(len, rows))
        print("\n".join(f"{name:{wide}}  {value}".rstrip() for name, value in rows.items()))
    return 0
