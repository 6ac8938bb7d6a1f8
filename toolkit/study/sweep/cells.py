"""Cells: a sweep's studies run, one combination each, here or on the engines of ipyparallel.

`run` and `spread` hand out the same pairs (place in the grid, `Outcome`), as cells finish. A study that fails
costs its own cell. What is left when a caller stops, Ctrl-C included, isn't run.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from ... import backend
from ...fields import interrupted, one_line, show
from ...models.load import Model
from . import fingerprint
from .grid import Combination

if TYPE_CHECKING:
    import pandas as pd

Study = Callable[..., Any]
_LOOK = 1.0  # seconds after which the engines are counted again: tasks of a cluster without any would wait


@dataclass(frozen=True, eq=False)
class Outcome:
    """A cell's table, or one line of its error; and where it was computed, as `backend.fingerprint` says."""

    frame: pd.DataFrame | None
    error: str = ""
    machine: Mapping[str, str | int] | None = None


Outcomes = Generator[tuple[int, Outcome], None, None]


def run(study: Study, points: Mapping[int, Combination]) -> Outcomes:
    """Cells in this process, one after the other."""
    for place, point in points.items():
        try:
            outcome = Outcome(cell(study, point))
        except (Exception, SystemExit) as error:  # also a study that exits, as on an engine
            outcome = Outcome(None, _line(type(error).__name__, str(error)))
        yield place, outcome


def spread(view: Any, study: Study, points: Mapping[int, Combination]) -> Outcomes:
    """Cells on engines, each to the next one that is free, in the order in which they finish."""
    running: dict[Any, int] = {}
    try:
        for place, point in points.items():
            running[view.apply_async(_remote, study, point)] = place
        while running:
            done, _ = wait(running, timeout=_LOOK, return_when=FIRST_COMPLETED)
            if not done and not view.client.ids:
                for place in running.values():
                    yield place, Outcome(None, "no engine is left to run it")
                return
            for task in done:
                yield running.pop(task), _received(task)
    finally:
        if running and view.client.ids:  # what an engine runs just now it goes on with, to no effect
            view.abort(list(running), block=False)


def cell(study: Study, point: Combination) -> pd.DataFrame:
    """One combination's table.

    Raises
    ------
    KeyboardInterrupt
        Also where the study caught it and handed out a part, as an engine does.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="interrupted: ")
        try:
            return _table(study(**point))
        except Exception as error:
            if interrupted(error):
                raise KeyboardInterrupt from None
            raise


def view_of(executor: Any) -> Any:
    """An executor's load-balanced view.

    Raises
    ------
    ValueError
        It is none, or has no engines.
    """
    try:
        from ipyparallel import Client, DirectView, LoadBalancedView
    except ImportError:
        raise ValueError(
            f'executor={show(executor)}: needs ipyparallel (pip install "mlx-seed-toolkit[distributed]")'
        ) from None
    if isinstance(executor, DirectView):
        view = executor.client.load_balanced_view(executor.targets)
    elif isinstance(executor, Client):
        view = executor.load_balanced_view() if executor.ids else None
    else:
        view = executor
    if view is not None and not isinstance(view, LoadBalancedView):
        raise ValueError(f"executor={show(executor)}: must be None, an ipyparallel Client or a view of one")
    if view is None or not view.client.ids:
        raise ValueError(f"executor={show(executor)}: has no engines; start some, or leave it out")
    return view


def portable(study: Study, points: Sequence[Combination]) -> None:
    """Refuse to send a model over the wire: each engine loads its own."""
    given = held(study) | {f"grid's {name}": v for point in points for name, v in point.items()}
    for name, value in given.items():
        if isinstance(value, Model):
            call = f'tk.loaded("{value.name}")'
            raise ValueError(
                f"{name}={show(value)}: a Model isn't sent to engines; call {call} in the study, "
                "which loads it once on each"
            )


def held(study: Any) -> dict[str, Any]:
    """What a study holds on to: arguments of a partial, a closure's and a module's names, attributes."""
    if isinstance(study, functools.partial):
        return {**held(study.func), **_numbered(study.args), **study.keywords}
    if isinstance(study, MethodType):
        return {**held(study.__func__), **held(study.__self__)}
    if isinstance(study, FunctionType):
        defaults = {**_numbered(study.__defaults__ or ()), **(study.__kwdefaults__ or {})}
        return {**fingerprint.globals_of(study), **fingerprint.closure_of(study), **defaults}
    return dict(getattr(study, "__dict__", {}))


def _numbered(values: Sequence[Any]) -> dict[str, Any]:
    return {f"argument {k}": value for k, value in enumerate(values)}


def _remote(study: Study, point: Combination) -> tuple[pd.DataFrame, dict[str, str | int]]:
    """A cell on an engine. It imports this module, and so `toolkit`, first: the BLAS is bound before MLX."""
    return cell(study, point), backend.fingerprint()


def _received(task: Any) -> Outcome:
    from ipyparallel.error import RemoteError

    try:
        frame, machine = task.get(0)
        return Outcome(frame, machine=machine)
    except RemoteError as error:
        if error.ename == "KeyboardInterrupt":
            raise KeyboardInterrupt from None
        if error.ename == "EngineError":
            return Outcome(None, "its engine died")
        return Outcome(None, _line(error.ename, error.evalue) + _hint(error.ename))
    except Exception as error:  # what can't be read back
        return Outcome(None, _line(type(error).__name__, str(error)))


def _hint(name: str) -> str:
    known = {
        "NameError": "; variables of the notebook don't exist on the engines: import it in the study",
        "ModuleNotFoundError": "; on the engine it isn't on the path",
    }
    return known.get(name, "")


def _table(result: Any) -> pd.DataFrame:
    import pandas as pd

    if getattr(result, "complete", True) is False:
        raise KeyboardInterrupt
    if hasattr(result, "to_frame") and not isinstance(result, pd.Series):
        result = result.to_frame()
    elif isinstance(result, Mapping):
        result = pd.DataFrame({name: pd.Series([value]) for name, value in result.items()})
    if not isinstance(result, pd.DataFrame):
        rule = "must return a result with to_frame(), a DataFrame, or a dict of scalars"
        raise ValueError(f"the study returned {show(result)}: it {rule}")
    if not result.columns.is_unique:
        twice = ", ".join(dict.fromkeys(map(str, result.columns[result.columns.duplicated()])))
        raise ValueError(f"the study's table has two columns {twice}; give each its own name")
    return result.reset_index(drop=True)


def _line(name: str, words: str) -> str:
    return one_line(f"{name}: {words}" if words else name)
