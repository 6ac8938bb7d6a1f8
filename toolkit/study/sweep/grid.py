"""Grids: the combinations that a sweep goes through, each with a text of its own that lasts.

A combination is a dict of keywords. A run that continues an interrupted one recognizes a combination by
its text, so the texts of 1, 1.0 and True differ, and NaN equals itself.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any

from ...fields import show

Combination = dict[str, Any]


def combinations(grid: Any) -> list[Combination]:
    """A grid's combinations, in order.

    Parameters
    ----------
    grid : mapping of str to iterable, or iterable of mappings
        Values for each name: their product, the last name fastest. Or the combinations themselves, all with
        the same names.

    Raises
    ------
    ValueError
        One line: no combination, a name that is no keyword, or a combination that is there twice.
    """
    if isinstance(grid, Mapping):
        values = [_values(name, given) for name, given in grid.items()]
        made = [dict(zip(grid, point, strict=True)) for point in itertools.product(*values)] if grid else []
    elif isinstance(grid, Iterable) and not isinstance(grid, str | bytes):
        made = [_point(k, point) for k, point in enumerate(grid)]
    else:
        raise ValueError(f"grid={show(grid)}: must map names to values, or be a list of dicts")
    if not made or not made[0]:
        raise ValueError("grid: has no combination; give at least one name, and a value for each")
    for name in made[0]:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"grid: {show(name)} is no keyword; names are the study's arguments")
    seen: dict[str, int] = {}
    for k, point in enumerate(made):
        if set(point) != set(made[0]):
            raise ValueError(f"grid[{k}]: names {', '.join(point)}; grid[0] names {', '.join(made[0])}")
        if seen.setdefault(text(point), k) != k:
            raise ValueError(f"grid: {said(point)} is there twice; keep one, or number the repetitions")
    return [{name: point[name] for name in made[0]} for point in made]


def accepted(study: Callable[..., Any], points: Iterable[Combination]) -> None:
    """Refuse names that the study doesn't take, before any cell runs."""
    try:
        takes = signature(study)
    except (TypeError, ValueError):  # some callables written in C don't say
        return
    for point in points:
        try:
            takes.bind(**point)
        except TypeError as error:
            name = getattr(study, "__name__", type(study).__name__)
            raise ValueError(f"grid: {name}{takes} can't be called with {said(point)}: {error}") from None


def text(value: Any) -> str:
    """A value as text, equal for equal values of one type."""
    try:
        return json.dumps(_keyed(value), default=lambda v: _keyed(_other(v)), sort_keys=True)
    except (TypeError, ValueError, RecursionError):  # it holds itself
        return repr(value)


def _keyed(value: Any) -> Any:
    """A value whose dicts tell the key 1 from "1", for which JSON has one word."""
    if isinstance(value, list | tuple):
        return [_keyed(one) for one in value]
    if not isinstance(value, dict):
        return value
    if all(isinstance(key, str) for key in value):
        return {key: _keyed(one) for key, one in value.items()}
    return {
        "(pairs)": sorted(([text(key), _keyed(one)] for key, one in value.items()), key=lambda pair: pair[0])
    }


def lasts(value: Any) -> bool:
    """Whether a value's text means the same in another process."""
    return _ADDRESS.search(text(value)) is None


def said(point: Combination) -> str:
    """A combination for a message."""
    return ", ".join(f"{name}={show(value, 40)}" for name, value in point.items())


def _values(name: Any, given: Any) -> list[Any]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise ValueError(
            f"grid[{show(name)}]={show(given)}: must be a list of values, such as [{show(given)}]"
        )
    values = list(given)
    if not values:
        raise ValueError(f"grid[{show(name)}]: has no values; give at least one")
    return values


def _point(k: int, point: Any) -> Combination:
    if not isinstance(point, Mapping):
        raise ValueError(f"grid[{k}]={show(point)}: must be a dict of names and values")
    return dict(point)


def plain(value: Any) -> Any:
    """An array or a scalar of one as plain numbers, for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _other(value: Any) -> Any:
    """What JSON has no word for."""
    with suppress(TypeError):
        return plain(value)
    if isinstance(value, set | frozenset):  # their order changes from process to process
        return sorted(map(text, value))
    if type(value).__eq__ is object.__eq__:  # two that say the same need not be the same
        return f"{type(value).__name__} at {id(value):#x}"
    if is_dataclass(value) and not isinstance(value, type):  # a short repr would not tell long prompts apart
        return {type(value).__name__: {f.name: getattr(value, f.name) for f in fields(value)}}
    return repr(value)


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
