"""Transfer: a row in a file, so that prefill in one process and decode in another continue one stream.

A safetensors file. Its tensors are the row's keys and values; its metadata hold one JSON text (the request,
the seed, and all that was drawn so far, floats in full) and a checksum of everything. The row goes on with
the same tokens and the same logprobs as it would have where it came from, to the bit where both engines are
invariant and of one kind.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from .. import noise
from ..fields import one_line, show
from ..forward.packed import PackedForward
from ..forward.spans import Forward
from ..models.load import Model
from ..requests import Request
from .admission import check
from .policies import Policy
from .row_state import Live

FORMAT = 3
_PLAIN = (
    "id",
    "choice",
    "prompt",
    "seed",
    "tokens",
    "kept",
    "cached",
    "begun",
    "drawn",
    "cohort",
    "kind",
    "place",
)
_FLOATS = ("logprobs", "margins", "max_drift")
_SAMPLE = 64  # values of each weight array that a signature looks at

_signatures: weakref.WeakKeyDictionary[Model, str] = weakref.WeakKeyDictionary()


def write(path: str | Path, row: Live, model: Model, forward: Forward, policy: Policy) -> None:
    """Write a row; the file is there whole or not at all.

    Raises
    ------
    ValueError
        Where its stream can't be continued elsewhere: a policy that draws from a shared generator, a forward
        that keeps no keys and values by row, or logits processors, which are functions.
    OSError
    """
    path = _path(path)
    packed = _packed(forward, policy, "export")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: {path.parent} is no directory; make it first")
    if path.exists() and not path.is_file():  # a device would be gone, with a file in its place
        raise ValueError(f"{path}: a directory or a device: name a file, which may be there already")
    about = {
        "format": FORMAT,
        "stream": noise.STREAM,
        "model": {"name": model.name, "signature": signature(model), "dtype": model.dtype},
        "shapes": asdict(packed.shapes),
        "request": row.request.to_json(),
        "row": {name: getattr(row, name) for name in _PLAIN},
        "drawn": {name: [None if math.isnan(v) else v for v in getattr(row, name)] for name in _FLOATS},
        "top": row.top,
    }
    pairs = row.pairs or (packed.read(row.key, row.kept) if row.kept else [])
    arrays = {f"{name}{i}": a for i, pair in enumerate(pairs) for name, a in zip("kv", pair, strict=True)}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as directory:
        whole = Path(directory) / "row.safetensors"
        arrays = arrays or {"none": mx.zeros((1,))}  # a file needs a tensor, of a row that waits too
        text = json.dumps(about)
        mx.save_safetensors(str(whole), arrays, {"row": text, "sha256": checksum(text, arrays)})
        os.replace(whole, path)


def read(path: str | Path, model: Model, forward: Forward, policy: Policy) -> Live:
    """A row from a file, its keys and values in `pairs`.

    Raises
    ------
    ValueError
        One line: not such a file, damaged, or written with another model, dtype, stream or set of shapes.
    """
    packed = _packed(forward, policy, "import")
    path = _path(path)
    try:
        arrays, metadata = mx.load(str(path), format="safetensors", return_metadata=True)
        about = json.loads(metadata["row"])
        version = about["format"]
    except (RuntimeError, OSError, KeyError, ValueError, TypeError) as error:
        why = "no such file" if not Path(path).exists() else one_line(str(error))[:80]
        raise ValueError(f"{path}: is not an exported row: {why}") from None
    try:
        _same_engine(path, version, about, model, packed)
        if metadata.get("sha256") != checksum(metadata["row"], arrays):
            raise ValueError(f"{path}: is not an exported row: damaged, or changed, since it was written")
        row = _row(path, about)
        if fault := _fault(row, model) or _misfit(arrays, row.kept, packed):
            raise ValueError(f"{path}: is not an exported row: {fault}")
        if row.kept:
            row.pairs = [(arrays[f"k{i}"], arrays[f"v{i}"]) for i in range(len(arrays) // 2)]
    except (KeyError, TypeError, AttributeError) as error:
        why = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(f"{path}: is not an exported row: {why}") from None
    return row


def _same_engine(path: str | Path, version: int, about: Any, model: Model, packed: PackedForward) -> None:
    """Refuse a row that was made with something else."""
    ours = {
        "format": (version, FORMAT),
        "stream": (about.get("stream"), noise.STREAM),
        "dtype": (about["model"]["dtype"], model.dtype),
        "model": (about["model"]["signature"], signature(model)),
        "shapes": (about["shapes"], json.loads(json.dumps(asdict(packed.shapes)))),
    }
    for name, (theirs, mine) in ours.items():
        if theirs != mine:
            if name == "model":
                theirs, mine = f"{about['model']['name']} ({theirs[:8]})", f"{model.name} ({mine[:8]})"
            raise ValueError(f"{path}: {one_line(f'{name}={theirs}')}: must be this engine's, {mine}")


def _row(path: str | Path, about: Any) -> Live:
    state = about["row"]
    row = Live(
        Request.from_json(about["request"], str(path)),
        state["id"],
        state["choice"],
        0,
        state["prompt"],
        state["seed"],
        state["tokens"],
    )
    for name in ("kept", "cached", "begun", "drawn", "cohort", "kind", "place"):
        setattr(row, name, state[name])
    for name in _FLOATS:
        setattr(row, name, [math.nan if v is None else v for v in about["drawn"][name]])
    row.top = [tuple((token, logprob) for token, logprob in step) for step in about["top"]]
    return row


def _fault(row: Live, model: Model) -> str:
    """What no engine could have written, which would stop this one, siblings and all, in a later step."""
    ids = isinstance(row.tokens, list) and all(_within(t, 0, model.vocab_size - 1) for t in row.tokens)
    if not (ids and _within(row.prompt, 1, len(row.tokens))):
        return "tokens: must be a prompt's ids and those generated, all in the vocabulary"
    resumed, most = row.request.generated, row.request.max_tokens
    count = len(row.generated) - len(resumed)
    lists = (row.logprobs, row.margins, row.max_drift)
    facts = {
        "id": isinstance(row.id, str) and row.id != "" and row.request.id in ("", row.id),
        "choice": _within(row.choice, 0, row.request.n - 1),
        "seed": _within(row.seed, -(2**63), 2**63 - 1),
        "generated": tuple(row.generated[: len(resumed)]) == resumed and len(row.generated) <= most,
        "kept": _within(row.kept, 0, len(row.tokens) - 1),
        "cached": _within(row.cached, 0, row.prompt),
        "begun": isinstance(row.begun, bool),
        "drawn": row.drawn is (count > 0),
        "cohort": _within(row.cohort, 0, 2**63 - 1) and _within(row.place, 0, 2**63 - 1),
        "kind": isinstance(row.kind, str),
        "logprobs": all(len(a) == count and all(isinstance(v, float) for v in a) for a in lists),
        "top": len(row.top) == count
        and all(
            _within(token, 0, model.vocab_size - 1) and isinstance(logprob, float)
            for step in row.top
            for token, logprob in step
        ),
    }
    wrong = next((name for name, holds in facts.items() if not holds), None)
    if wrong is not None:
        return f"{wrong}: does not fit the rest of the row"
    try:
        check(row.request.replace(tokens=row.tokens[: row.prompt]), model)
    except ValueError as error:
        return str(error)
    return ""


def _within(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _misfit(arrays: dict[str, mx.array], kept: int, packed: PackedForward) -> str:
    """What is wrong with keys and values; those that the forward reads have these shapes and types."""
    due: dict[str, Any] = {}
    for i, g in enumerate(packed.store.geometry if kept else ()):
        due[f"k{i}"] = (g.key_heads, kept, g.key_dim), g.dtype
        due[f"v{i}"] = (g.value_heads, kept, g.value_dim), g.dtype
    due = due or {"none": ((1,), mx.float32)}
    fits = {name: (a.shape, a.dtype) for name, a in arrays.items()} == due
    return "" if fits else f"its keys and values aren't those of {kept} tokens in {len(due) // 2} layers"


def checksum(text: str, arrays: dict[str, mx.array]) -> str:
    """SHA-256 of a row's JSON text and of each array, by name."""
    digest = hashlib.sha256(text.encode())
    for name, array in sorted(arrays.items()):
        digest.update(name.encode())
        digest.update(np.array(mx.contiguous(array).reshape(-1).view(mx.uint8)).data)
    return digest.hexdigest()


def signature(model: Model) -> str:
    """A hash of a model's weights: every array's name, type and shape, and a sample of its values."""
    if model not in _signatures:
        digest = hashlib.sha256(json.dumps(model.config, sort_keys=True, default=str).encode())
        parts = []
        for name, array in sorted(tree_flatten(model.module.parameters())):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            step = max(1, array.size // _SAMPLE)
            parts.append(array.reshape(-1)[::step].astype(mx.float32))
        digest.update(np.array(mx.concatenate(parts)).tobytes())
        _signatures[model] = digest.hexdigest()
    return _signatures[model]


def _path(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike) or not str(path) or "\0" in str(path):
        raise ValueError(f"path={show(path)}: must name a file")
    return Path(path)


def _packed(forward: Forward, policy: Policy, what: str) -> PackedForward:
    if policy.shares:
        raise ValueError(
            f'policy="{policy.name}": can\'t {what} a row: its generator stays; use policy="keyed"'
        )
    if not isinstance(forward, PackedForward):
        raise ValueError(f'forward="{forward.name}": can\'t {what} a row; use forward="packed"')
    return forward
