"""Kept cells: what a sweep has finished, in a directory, so that the same sweep goes on where it was stopped.

`sweep.json` says whose cells they are; each cell is a file of its own, there whole or not at all. Tables come
back with the same types and bits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__, backend, files, noise
from . import fingerprint, grid

if TYPE_CHECKING:
    import pandas as pd

_ABOUT = "sweep.json"


class Kept:
    """A directory of finished cells.

    Parameters
    ----------
    path : Path
        Made if it isn't there.
    study : callable
    names : list of str
        The grid's names.

    Raises
    ------
    ValueError
        One line: the directory is of another sweep, or of none.
    """

    def __init__(self, path: Path, study: Callable[..., Any], names: list[str]):
        self.path = path
        try:
            settings = fingerprint.digest(study)
        except ValueError as error:
            raise ValueError(f"out={path}: {error}") from None
        about = {
            "study": name_of(study),
            "grid": sorted(names),
            "settings": settings,
            "machine": backend.fingerprint(),
            "toolkit": __version__,
            "stream": noise.STREAM,
        }
        if (path / _ABOUT).is_file():
            if not self.empty:
                self._same(about)
        elif path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ValueError(f"out={path}: has no sweep's cells in it; name a new directory or an empty one")
        elif not path.parent.is_dir():
            raise ValueError(f"out={path}: there is no directory {path.parent}; make it first")
        path.mkdir(exist_ok=True)
        if self.empty:  # of a study that was mended before it had a cell, too
            files.write(path / _ABOUT, json.dumps(about, indent=1, sort_keys=True).encode())

    @property
    def empty(self) -> bool:
        """Whether no cell is there."""
        return next(self.path.glob("cell-*.json"), None) is None

    def get(self, point: grid.Combination) -> pd.DataFrame | None:
        """A combination's table, if it's there."""
        file = self._file(point)
        if not file.is_file():
            return None
        try:
            kept = json.loads(file.read_text())
            if kept["combination"] == grid.text(point):
                return _frame(kept["columns"])
        except (ValueError, KeyError, TypeError):
            pass
        raise ValueError(f"{file}: is not this cell's table; delete the file, and the cell runs again")

    def put(self, point: grid.Combination, frame: pd.DataFrame) -> None:
        """Keep a combination's table.

        Raises
        ------
        ValueError
            One line: it would not come back as it is.
        """
        try:
            columns = [[name, str(frame[name].dtype), _values(frame[name])] for name in frame]
            data = json.dumps({"combination": grid.text(point), "columns": columns}, default=grid.plain)
            whole = _frame(json.loads(data)["columns"]).equals(frame)
        except (TypeError, ValueError):
            whole = False
        if not whole:
            types = ", ".join(f"{name} ({frame[name].dtype})" for name in frame)
            raise ValueError(
                f"out={self.path}: a table of {types} can't be kept; give plain numbers and text"
            )
        files.write(self._file(point), data.encode())

    def remove(self) -> None:
        """Delete the cells and their directory."""
        for file in [*self.path.glob("cell-*.json"), self.path / _ABOUT]:
            file.unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def _file(self, point: grid.Combination) -> Path:
        return self.path / f"cell-{hashlib.sha256(grid.text(point).encode()).hexdigest()[:20]}.json"

    def _same(self, about: dict[str, Any]) -> None:
        try:
            found = json.loads((self.path / _ABOUT).read_text())
        except ValueError:
            found = {}
        other = [name for name in about if not isinstance(found, dict) or found.get(name) != about[name]]
        if other:
            what = {"settings": "code or settings of the study", "toolkit": "version of the toolkit"}
            differ = ", ".join(what.get(name, name) for name in other)
            advice = "name another place, or delete it"
            raise ValueError(f"out={self.path}: holds cells of another sweep (its {differ}); {advice}")


def name_of(study: Any) -> str:
    """A study's name, for people."""
    if isinstance(study, partial):
        return name_of(study.func)
    return str(getattr(study, "__name__", type(study).__name__))


def _values(column: Any) -> list[Any]:
    missing = column.isna() if str(column.dtype) in ("Int64", "boolean", "Float64") else None
    values = column.tolist()
    return values if missing is None else [None if m else v for v, m in zip(values, missing, strict=True)]


def _frame(columns: list[Any]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame({name: pd.Series(values, dtype=kind) for name, kind, values in columns})
