"""Fingerprint: a digest that identifies a study, the same in any process.

Everything that a study contains or refers to counts, by content: its code and that of its module's helpers,
defaults, closures, globals, attributes, tables. Modules, and functions and classes of other modules, count by
name (such a function by its own code as well). What has no content to go by is refused, not passed over.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import inspect
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

from ...engine import transfer
from ...fields import show
from ...models.load import Model

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+", re.IGNORECASE)
_MADE = ("<string>", "<attrs")  # files of methods that dataclasses and the like generate from the fields


def digest(study: Any) -> str:
    """A digest of all that a study does, as far as it can be seen.

    Raises
    ------
    ValueError
        One line that names a value which another process couldn't tell again: a lock, an open file...
    """
    try:
        return _Teller(study).tell(study, ())
    except RecursionError:
        raise ValueError("can't tell the study again: what it holds is nested too deep") from None


def globals_of(function: FunctionType) -> dict[str, Any]:
    """The globals that a function names, nested functions and comprehensions included."""
    found = function.__globals__
    named = sorted(set(_names(function.__code__)))
    return {name: found[name] for name in named if name in found and name != "__builtins__"}


def closure_of(function: FunctionType) -> dict[str, Any]:
    """What a function holds in its closure, but for cells that aren't filled yet."""
    filled = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            filled[name] = cell.cell_contents
        except ValueError:
            continue
    return filled


def _names(code: CodeType) -> Iterator[str]:
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            yield one.argval
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)


class _Teller:
    """One walk through a study. What it has met is known again, so that a cycle ends."""

    def __init__(self, study: Any):
        self.own = {"__main__", *_modules(study)}
        self.met: dict[int, tuple[str, Any]] = {}  # with the value: its id stays its own

    def tell(self, value: Any, path: tuple[str, ...]) -> str:
        if type(value) in _PLAIN:
            return _hash(type(value).__name__, repr(value))
        if id(value) not in self.met:
            self.met[id(value)] = (_hash("met before", len(self.met)), value)
            self.met[id(value)] = (_hash(*self._parts(value, path)), value)
        return self.met[id(value)][0]

    def _parts(self, value: Any, path: tuple[str, ...]) -> Iterable[Any]:
        """The parts of a value: texts, and digests of what is in it."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, Model):
            return kind, value.name, value.dtype, value.note, transfer.signature(value)
        if isinstance(value, ModuleType):
            return kind, value.__name__
        if isinstance(value, CodeType):
            return self._code(value, path)
        if isinstance(value, FunctionType):
            return self._function(value, path)
        if isinstance(value, type):
            return self._class(value, path)
        if isinstance(value, functools.partial):
            held = self._named(value.keywords, path)
            return kind, self.tell(value.func, path), *self._each(value.args, path), held
        if isinstance(value, MethodType):
            return kind, self.tell(value.__func__, path), self.tell(value.__self__, path)
        if isinstance(value, BuiltinFunctionType):
            whose = value.__self__
            bare = whose is None or isinstance(whose, ModuleType)
            return kind, value.__module__, value.__qualname__, "" if bare else self.tell(whose, path)
        if isinstance(value, staticmethod | classmethod):
            return kind, self.tell(value.__func__, path)
        if isinstance(value, property):
            return kind, *self._each((value.fget, value.fset, value.fdel), path)
        if isinstance(value, functools.cached_property):
            return kind, self.tell(value.func, path)
        if isinstance(value, CellType):
            return kind, self.tell(value.cell_contents, path)
        if isinstance(value, Enum):
            return kind, value.name
        if isinstance(value, PurePath):
            return kind, str(value)
        if isinstance(value, logging.Logger):
            return kind, value.name
        if isinstance(value, np.ndarray | np.generic):
            if value.dtype.hasobject:
                return kind, str(value.dtype), value.shape, self.tell(value.tolist(), path)
            return kind, str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()
        if isinstance(value, mx.array):
            return kind, str(value.dtype), value.shape, self.tell(value.tolist(), path)
        if (parts := self._frame(value, path)) is not None:
            return kind, *parts
        if _importable(value) and value.__module__ not in self.own:
            return kind, value.__module__, value.__qualname__
        if hasattr(value, "__wrapped__"):  # functools.cache and the like: what it remembers doesn't count
            return kind, self.tell(value.__wrapped__, path)
        return self._object(kind, value, path)

    def _object(self, kind: str, value: Any, path: tuple[str, ...]) -> Iterable[Any]:
        """Containers and plain objects: what is in them, their class, and their attributes."""
        parts = [kind, self.tell(type(value), path)]
        call = getattr(type(value), "__call__", None)  # noqa: B004 - of its class, as Python calls it
        if isinstance(call, FunctionType):
            parts.append(self.tell(call, path))
        if isinstance(value, dict):
            for key, one in value.items():
                parts += [self.tell(key, path), self.tell(one, (*path, f"[{show(key, 20)}]"))]
        elif isinstance(value, set | frozenset):  # their order changes from process to process
            parts += sorted(self._each(value, path))
        elif isinstance(value, list | tuple):
            parts += self._each(value, path)
        elif isinstance(value, _PLAIN):
            parts.append(repr(value))
        else:
            try:
                made = _reduced(value)
            except Exception:
                if not (text := repr(value)).startswith("<") and not _ADDRESS.search(text):
                    return *parts, text
                where = ".".join(path).replace(".[", "[") or "the study"
                raise ValueError(
                    f"can't tell {where}={show(value)} again: it would not be the same in another run; "
                    "make it in the study"
                ) from None
            if made is not None:
                return *parts, self.tell(made, path)
        return *parts, self._named(_attributes(value), path)

    def _function(self, value: FunctionType, path: tuple[str, ...]) -> Iterable[Any]:
        module = value.__globals__.get("__name__", value.__module__)
        parts = [module, value.__qualname__, self.tell(value.__code__, path)]
        own, made = module in self.own, value.__code__.co_flags & inspect.CO_NESTED
        if own or made:
            parts += self._each(value.__defaults__ or (), path)
            parts.append(self._named(value.__kwdefaults__ or {}, path))
            parts.append(self._named(closure_of(value) | vars(value), path))
        if own:
            parts.append(self._named(globals_of(value), path))
        return parts

    def _class(self, value: type, path: tuple[str, ...]) -> Iterable[Any]:
        parts = [value.__module__, value.__qualname__]
        if value.__module__ not in self.own:
            return parts
        told = {name: one for name, one in vars(value).items() if _counts(name, one)}
        if is_dataclass(value):
            parts += [f"{f.name}: {f.type}" for f in fields(value)]
        return *parts, *self._each(value.__bases__, path), self._named(told, path)

    def _code(self, code: CodeType, path: tuple[str, ...]) -> Iterable[Any]:
        names = (code.co_names, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], code.co_flags)
        return code.co_code.hex(), code.co_exceptiontable.hex(), *names, *self._each(code.co_consts, path)

    def _frame(self, value: Any, path: tuple[str, ...]) -> list[Any] | None:
        """A table's content: its repr would leave out what is in the middle."""
        pandas = sys.modules.get("pandas")
        if pandas is None or not isinstance(value, pandas.DataFrame | pandas.Series | pandas.Index):
            return None
        if isinstance(value, pandas.DataFrame):
            columns = [(str(value.dtypes.iloc[k]), value.iloc[:, k].tolist()) for k in range(value.shape[1])]
            return self._each((value.columns.tolist(), value.index.tolist(), columns), path)
        index = value.index.tolist() if isinstance(value, pandas.Series) else None
        return self._each((value.name, str(value.dtype), index, value.tolist()), path)

    def _each(self, values: Iterable[Any], path: tuple[str, ...]) -> list[str]:
        return [self.tell(value, path) for value in values]

    def _named(self, values: dict[str, Any], path: tuple[str, ...]) -> str:
        names = sorted(values, key=str)
        return _hash(*((str(name), self.tell(values[name], (*path, str(name)))) for name in names))


def _hash(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode(errors="backslashreplace")).hexdigest()[:32]


def _modules(study: Any) -> Iterator[str]:
    """The modules whose helpers are a study's own."""
    while isinstance(study, functools.partial | MethodType):
        if isinstance(study, MethodType):
            yield type(study.__self__).__module__
        study = study.func if isinstance(study, functools.partial) else study.__func__
    inner = inspect.unwrap(study)
    for one in (study, inner):
        yield one.__globals__.get("__name__", "") if isinstance(one, FunctionType) else type(one).__module__


def _importable(value: Any) -> bool:
    """Whether a callable of a library is what its name says: a compiled function, a ufunc."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return isinstance(name, str) and getattr(sys.modules.get(str(module)), name, None) is value


def _counts(name: str, one: Any) -> bool:
    """Whether a class's attribute is of its author's making."""
    if isinstance(one, FunctionType):
        return not one.__code__.co_filename.startswith(_MADE)
    made = inspect.ismemberdescriptor(one) or inspect.isgetsetdescriptor(one)
    return not made and not name.startswith(("__", "_abc_"))


def _attributes(value: Any) -> dict[str, Any]:
    """An object's attributes, but for those that it computes and remembers."""
    slots = [name for kind in type(value).__mro__ for name in _texts(vars(kind).get("__slots__", ()))]
    found = {
        name: getattr(value, name) for name in slots if not name.startswith("__") and hasattr(value, name)
    }
    return {
        name: one
        for name, one in {**found, **getattr(value, "__dict__", {})}.items()
        if not isinstance(inspect.getattr_static(type(value), str(name), None), functools.cached_property)
    }


def _reduced(value: Any) -> Any:
    """An object as pickle takes it to pieces; None where that is no more than its class and attributes.

    Raises
    ------
    TypeError
        It can't be: a lock, an open file, a generator.
    """
    if type(value) is object:
        raise TypeError("another one would say the same")
    known = copyreg.dispatch_table.get(type(value))
    made = known(value) if known else value.__reduce_ex__(2)
    if isinstance(made, str):
        return made
    if made[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
        return None
    return [*made[:3], *(list(items) for items in made[3:5] if items is not None)]


def _texts(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
