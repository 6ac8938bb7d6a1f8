"""Attach: gives an unmodified mlx-lm model the row structure of a packed step.

A packed step feeds a model `[T, 1]` tokens, each a batch row of its own. Everything token-wise then works as
it is. Two things are not token-wise, and both are reached through the cache list that every mlx-lm model
hands down: attention (each layer's cache object attends for it) and the output head (only the tokens
that a step samples from go through). Nothing here computes; `packed` does. Two more are replaced for speed:
on a CPU the layers' gate, `swiglu`, by one with a faster exponential; on CUDA linear layers (`cuda_linear`).
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations

from . import cpu_exp

if TYPE_CHECKING:
    from .cuda_linear import Hook

Name = tuple[str, str]
"""A function by the names of its module and its own; a method's with its class's before it."""

ATTENTION, GATE = "scaled_dot_product_attention", "swiglu"
LINEAR = (nn.Linear.__module__, "Linear.__call__")
_lock = threading.RLock()
_blocks: dict[object, tuple[int, list[Name]]] = {}  # the blocks that run now: their thread, and their names
_originals: dict[Name, Any] = {}
_local = threading.local()


class Attending:
    """A layer's cache that attends for its layer. `packed` subclasses it."""

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        raise TypeError("a cache that attends must define attend()")


def keep(cache: Attending, keys: mx.array) -> None:
    """Note that these keys are this cache's: a layer that reuses another's keys hands on the same array."""
    _local.owners[id(keys)] = (keys, cache)  # the array is held, so that its id stays its own


def _dispatch(original, queries, keys, values, cache=None, scale=1.0, mask=None, sinks=None, **options):
    owners = getattr(_local, "owners", None)
    if owners is None:  # not a packed step, or another thread's
        options |= {} if sinks is None else {"sinks": sinks}
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **options)
    _, owner = owners.get(id(keys), (None, cache))
    if not isinstance(owner, Attending):
        raise TypeError("it attends over keys that no cache keeps")
    return owner.attend(queries, keys, values, scale, mask, sinks)


def _gate(original, gate, x):
    return original(gate, x) if getattr(_local, "owners", None) is None else cpu_exp.swiglu(gate, x)


def _linear(original, layer, x):
    hook = getattr(_local, "linear", None)
    return original(layer, x) if hook is None else hook(layer, x, original)


def functions_of(model: nn.Module, cpu: bool) -> list[Name]:
    """What this model's layers call for attention, and on a CPU for their gate, which is slow there."""
    modules = {kind.__module__ for part in model.modules() for kind in type(part).__mro__}
    spaces = {name: vars(sys.modules[name]) for name in modules if name in sys.modules}
    found = [(name, ATTENTION) for name, space in spaces.items() if ATTENTION in space]
    with _lock:  # another thread's step may have replaced it just now
        gates = {name: _originals.get((name, GATE), space.get(GATE)) for name, space in spaces.items()}
    if cpu:
        found += [(name, GATE) for name, gate in gates.items() if gate is activations.swiglu]
    return sorted(found)


@contextmanager
def attached(names: list[Name], linear: Hook | None = None) -> Iterator[None]:
    """Within the block, in this thread, attention of these names goes to the cache that keeps the keys, and
    the gate to `cpu_exp`; linear layers go to `linear` if given.

    Every other caller, in any other thread, gets what it got before. The modules are restored when the last
    block leaves, on error too. An interrupt may end this very function at any line, so callers end a call
    that raised by `detach`.
    """
    block = object()
    outer = [getattr(_local, name, None) for name in ("owners", "linear", "block")]
    try:
        _blocks[block] = threading.get_ident(), names if linear is None else [*names, LINEAR]
        _settle()
        _local.owners, _local.linear, _local.block = {}, linear, block
        yield
    finally:
        if getattr(_local, "block", None) is block:  # not where `detach` came first
            _local.owners, _local.linear, _local.block = outer
        _blocks.pop(block, None)
        _settle()


def detach() -> None:
    """End every block of this thread, wherever an exception left it. For use when a call has raised."""
    with suppress(RuntimeError):  # "cannot release un-acquired lock": an interrupt may have left it held
        while True:
            _lock.release()
    for block, (thread, _) in tuple(_blocks.items()):
        if thread == threading.get_ident():
            _blocks.pop(block, None)
    _local.owners = _local.linear = _local.block = None
    _settle()


def _settle() -> None:
    """Replace what a running block needs replaced and restore the rest; done twice, it does nothing."""
    with _lock:
        needed = {name for _, names in tuple(_blocks.values()) for name in names}
        for name in needed:
            owner, function = _place(name)
            there = getattr(owner, function)
            if not hasattr(there, "replaces"):
                _originals[name] = there
                setattr(owner, function, _instead(there, function))
        for name in _originals.keys() - needed:
            setattr(*_place(name), _originals[name])
            del _originals[name]


def _place(name: Name) -> tuple[Any, str]:
    """What holds the function, and its name there."""
    module, (*path, function) = sys.modules[name[0]], name[1].split(".")
    return (getattr(module, path[0]) if path else module), function


def _instead(original: Any, function: str) -> Callable[..., Any]:
    ours: Any = {ATTENTION: _dispatch, GATE: _gate}.get(function, _linear)

    def call(*args: Any, **options: Any) -> Any:  # a function, so that a class makes a method of it
        return ours(original, *args, **options)

    call.replaces = original  # type: ignore[attr-defined]
    return call


class Caches(list):
    """The cache list of one forward; `select` picks the hidden states that go through the head.

    `selected` is True once the model's head was found and has selected.
    """

    def __init__(self, layers: list[Any], select: Callable[[mx.array], mx.array]):
        super().__init__(layers)
        self.select, self.selected = select, False


class _Selecting(nn.Module):
    """A backbone whose output keeps only the tokens that will be sampled from."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.inner(*args, **kwargs)
        caches = next((a for a in (*args, *kwargs.values()) if isinstance(a, Caches)), None)
        if caches is None or not isinstance(hidden, mx.array):
            return hidden
        caches.selected = True
        return caches.select(hidden)

    def __getattr__(self, name: str) -> Any:
        if name in self or "inner" not in self:
            return super().__getattr__(name)
        return getattr(self["inner"], name)


def selecting(model: nn.Module) -> nn.Module:
    """The same model and weights, with a head that sees only what `Caches.select` picks.

    A shallow copy: the caller's model is not touched. If the backbone and the head can't be
    separated, the model is returned as it is, and the whole head runs.
    """
    for name in ("model", "transformer", "backbone", "language_model"):
        inner = model.get(name) if isinstance(model, dict) else None
        if isinstance(inner, nn.Module) and inner is not model:
            view = copy.copy(model)
            deeper = any(isinstance(inner.get(n), nn.Module) for n in ("lm_head", "embed_out"))
            deeper = deeper or (name == "language_model" and isinstance(inner.get("model"), nn.Module))
            view[name] = selecting(inner) if deeper else _Selecting(inner)
            return view
    return model
