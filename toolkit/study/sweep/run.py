"""Sweep: a study asked for each combination of a grid, here or on several engines, as one table.

What a combination answers doesn't depend on where or when it ran: the table is in the grid's order, and the
same to the bit from one process or from many. `grid` makes the combinations, `cells` runs them, `store` keeps
what is finished, `fingerprint` identifies a study.
"""

from __future__ import annotations

import html
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from ... import backend, files
from ...chart_lookup import chart_function
from ...fields import one_line, show
from . import cells, tables
from .grid import Combination, accepted, combinations, lasts, said
from .store import Kept, name_of

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = 20  # lines of a table in a notebook


@dataclass(frozen=True, eq=False)
class Sweep:
    """A study's answers for the combinations of a grid.

    Attributes
    ----------
    study : str
        Its name.
    """

    study: str
    _points: Sequence[Combination]
    _outcomes: Mapping[int, cells.Outcome]

    def to_frame(self) -> pd.DataFrame:
        """The studies' tables one under the other, in the grid's order, the grid's columns first.

        A column that the study has too, with the very values of the grid, is there once.
        """
        done = {k: o.frame for k, o in sorted(self._outcomes.items()) if o.frame is not None}
        return tables.joined([self._points[k] for k in done], list(done.values()), list(self._points[0]))

    @property
    def failed(self) -> pd.DataFrame:
        """One row a combination that failed: the grid's columns, `error`."""
        lines = {k: o.error for k, o in sorted(self._outcomes.items()) if o.frame is None}
        return tables.listed([self._points[k] for k in lines], self._points[0]).assign(
            error=list(lines.values())
        )

    @property
    def missing(self) -> pd.DataFrame:
        """One row a combination that wasn't run, because the sweep was interrupted: the grid's columns."""
        return tables.listed(
            [p for k, p in enumerate(self._points) if k not in self._outcomes], self._points[0]
        )

    @property
    def ok(self) -> bool:
        """Whether every combination has its answer."""
        return len(self._outcomes) == len(self._points) and not len(self.failed)

    def chart(self, y: str, x: str | None = None, color: str | None = None, **options: Any) -> Any:
        """A column of the table against one or two of the grid's parameters.

        Parameters
        ----------
        y : str
            A column of numbers; each combination gives a point, its mean.
        x, color : str, optional
            Two of the grid's names; the first two if left out. A point is made of the rows of all cells that
            differ in the others.
        **options
            `how="max"`, "min", "sum" or "nunique" instead of the mean; `width`, `title`.
        """
        names = list(self._points[0])
        x = x or next((name for name in names if name != color), names[0])
        color = color or next((name for name in names if name != x), None)
        for what, name in (("x", x), ("color", color)):
            if name is not None and name not in names:
                raise ValueError(f'{what}="{name}": must be one of {", ".join(names)}')
        return chart_function("sweep")(self.to_frame(), y=y, x=x, color=color, **options)

    def __repr__(self) -> str:
        counts = (
            len(self._points),
            len(self._outcomes) - len(self.failed),
            len(self.failed),
            len(self.missing),
        )
        words = "{} cells: {} done, {} failed, {} not run".format(*(f"{n:,}" for n in counts))
        return f"Sweep({self.study}: {words if not self.ok else words.split(',')[0]})"

    def _repr_html_(self) -> str:
        frame = self.to_frame()
        more = f"<p>{len(frame) - _SHOWN:,} more; to_frame() has them all</p>" if len(frame) > _SHOWN else ""
        failed = str(self.failed._repr_html_()) if len(self.failed) else ""
        head = f"<p>{html.escape(repr(self), quote=False)}</p>"
        return head + failed + str(frame.head(_SHOWN)._repr_html_()) + more


def sweep(
    study: cells.Study,
    grid: Any,
    executor: Any = None,
    *,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Sweep:
    """Ask a study for each combination of a grid.

    Parameters
    ----------
    study : callable
        Called with a combination as keywords. Returns anything with `to_frame()` (`tk.first_tokens`,
        `tk.seed_matrix`, `tk.drift`, `Results`...), a DataFrame, or a dict of scalars. One that raises costs
        its own cell.
    grid : dict of str to list, or list of dict
        Values for each name: their product, the last name fastest. Or the combinations themselves.
    executor : ipyparallel Client or view, optional
        Cells run on its engines, each on the next that is free; None runs them here. A model isn't sent:
        `tk.loaded(name)` in the study loads it once on each engine.
    out : path, optional
        A directory: finished cells are kept there, and the same sweep run again does only what it lacks. A
        file in .jsonl, .csv or .parquet: the table, written once every cell has run; until all are done,
        they are kept in the directory FILE.cells.
    progress : bool
        Show a bar.

    Returns
    -------
    Sweep
        Interrupted, with the cells that were finished.

    Raises
    ------
    ValueError
        One line. Before anything runs: a grid without combinations, names that the study doesn't take, an
        `out` of another sweep, or a study that holds an object without a fingerprint. Later: a column of a
        grid's name in the study's table, with other values.
    """
    if not callable(study):
        raise ValueError(f"study={show(study)}: must be a function of the grid's names")
    points = combinations(grid)
    accepted(study, points)
    view = cells.view_of(executor) if executor is not None else None
    if view is not None:
        cells.portable(study, points)
    kept, file = _places(out, study, points)
    outcomes: dict[int, cells.Outcome] = {}
    if kept:
        found = {k: frame for k, point in enumerate(points) if (frame := kept.get(point)) is not None}
        outcomes |= {k: cells.Outcome(frame) for k, frame in found.items()}
    todo = {k: point for k, point in enumerate(points) if k not in outcomes}
    work = cells.run(study, todo) if view is None else cells.spread(view, study, todo)
    name, total = name_of(study), len(points)
    machines: set[str] = set()
    try:
        with (
            closing(work),
            tqdm(
                total=total,
                initial=len(outcomes),
                desc=f"sweep of {name}",
                unit="cell",
                disable=not progress,
                leave=False,
            ) as bar,
        ):
            for k, outcome in work:
                if outcome.frame is not None:
                    tables.joined([points[k]], [outcome.frame], list(points[k]))  # reports a clash at once
                    if _compare(outcome.machine, machines) and kept:
                        outcome = _kept(kept, points[k], outcome)
                outcomes[k] = outcome
                bar.update()
    except KeyboardInterrupt:
        where = f"; they are kept in {kept.path}" if kept and not kept.empty else ""
        warnings.warn(f"interrupted: {len(outcomes)} of {total} cells are there{where}", stacklevel=2)
    finally:
        if file and kept and kept.empty:
            kept.remove()
    made = Sweep(name, points, outcomes)
    if file and len(outcomes) == total > len(made.failed):
        files.write(file, files.table(tables.flat(made.to_frame()), file.suffix))
        if kept and made.ok:
            kept.remove()
    return made


def _places(out: Any, study: cells.Study, points: Sequence[Combination]) -> tuple[Kept | None, Path | None]:
    """Where finished cells are kept, and the file that their table goes to."""
    if out is None:
        return None, None
    if not isinstance(out, str | os.PathLike) or not str(out) or "\0" in str(out):
        raise ValueError(f"out={show(out)}: must name a directory or a file")
    for point in points:
        if not lasts(point):
            rule = "only plain values are the same in another run; give names or numbers"
            raise ValueError(f"out={out}: can't tell {said(point)} again: {rule}")
    path = Path(out)
    file = path if path.suffix in files.TABLES and not path.is_dir() else None
    if file:
        files.check("out", str(file))
    return Kept(path.with_name(path.name + ".cells") if file else path, study, list(points[0])), file


def _kept(kept: Kept, point: Combination, outcome: cells.Outcome) -> cells.Outcome:
    """A cell that is kept, or failed because its table can't be."""
    assert outcome.frame is not None
    try:
        kept.put(point, outcome.frame)
        return outcome
    except ValueError as error:
        return cells.Outcome(None, one_line(f"ValueError: {error}"))


def _compare(machine: Mapping[str, str | int] | None, known: set[str]) -> bool:
    """Whether a cell is as this machine computes; warns once of each engine that computes otherwise."""
    here = backend.fingerprint()
    if machine is None or machine == here:
        return True
    if repr(machine) not in known:
        known.add(repr(machine))
        differ = ", ".join(f"{k}: {machine.get(k)}, here {here.get(k)}" for k in {**here, **machine}
                           if machine.get(k) != here.get(k))  # fmt: skip
        warnings.warn(
            "an engine computes otherwise than this process, in last bits perhaps; "
            f"out= keeps none of its cells ({differ})",
            stacklevel=3,
        )
    return False
