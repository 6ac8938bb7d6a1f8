"""Directory: what a model directory must be before anything of it is loaded. Runs none of its code.

mlx-lm and transformers would import Python files that a configuration names, build as many layers as it asks
for, and answer what they can't read in words of their own. Here a directory is read as data first.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..fields import one_line, show

__all__ = ["check", "globbable"]

_IDENTIFIER = re.compile(r"[A-Za-z0-9][\w.-]*")
# Counts that size a model; a configuration may leave them out.
_COUNTS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
           "num_key_value_heads", "head_dim", "vocab_size")  # fmt: skip
_LARGEST = 2**24  # larger than any of these in a published model; the next size is a typing error
_HEADER = 2**27  # bytes of a safetensors header, which lists tensors and holds none


def check(path: Path, fix: str = "") -> dict[str, Any]:
    """The configuration of a model directory, once it is known to be data that can be loaded.

    Parameters
    ----------
    path : Path
    fix : str
        Added to each error: what a user can do about this directory.

    Raises
    ------
    ValueError
        One line, with the file and the field.
    """
    config = _json(path / "config.json", f"has no config.json, so it's no model directory{fix}", fix)
    _no_code(path / "config.json", config, "model_file", fix)
    for file in ("config.json", "tokenizer_config.json"):
        if (path / file).is_file():
            _names(path / file, _json(path / file, "", fix), fix)
    weights = sorted(path.glob("model*.safetensors"))
    if not weights:
        raise ValueError(f"model={show(str(path))}: has no model*.safetensors, so no weights{fix}")
    tensors = sum(_tensors(file, fix) for file in weights)
    for where, values in (("", config), ("text_config.", config.get("text_config"))):
        if not isinstance(values, dict):
            if values is None:
                continue
            raise _refused(path / "config.json", "text_config", values, f"must be an object{fix}")
        for name in _COUNTS:
            most = tensors if name == "num_hidden_layers" else _LARGEST
            value = values.get(name)
            if value is None or isinstance(value, list):  # some families have a value per layer
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
                why = f", the number of tensors in {len(weights)} weight files" if most == tensors else ""
                rule = f"must be an integer from 1 to {most:,}{why}{fix}"
                raise _refused(path / "config.json", where + name, value, rule)
    return config


@contextmanager
def globbable(path: Path) -> Iterator[Path]:
    """The directory under a name without `[`, `*` and `?`, which mlx-lm would take for a pattern."""
    if not set("[*?") & set(str(path)):
        yield path
        return
    with TemporaryDirectory() as place:
        link = Path(place) / "model"
        link.symlink_to(path.resolve(), target_is_directory=True)
        yield link


def _refused(file: Path, name: str, value: Any, rule: str) -> ValueError:
    return ValueError(f"{one_line(str(file))}: {show(name)[1:-1]}={show(value)}: {rule}")


def _json(file: Path, missing: str, fix: str) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"model={show(str(file.parent))}: {missing}") from None
    except (ValueError, RecursionError) as error:  # no JSON, or nested deeper than Python reads
        raise ValueError(f"{one_line(str(file))}: is no JSON: {one_line(str(error))}{fix}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{one_line(str(file))}: must hold a JSON object{fix}")
    return value


def _no_code(file: Path, config: dict[str, Any], name: str, fix: str) -> None:
    if config.get(name) is not None:
        rule = f"names Python code to run, and a model's code is never run; use a model without it{fix}"
        raise _refused(file, name, config[name], rule)


def _names(file: Path, config: dict[str, Any], fix: str) -> None:
    """Names that are imported must be single names: of a module of mlx-lm's, never a path."""
    for name in ("model_type", "chat_template_type", "tool_parser_type"):
        value = config.get(name)
        if value is not None and not (isinstance(value, str) and _IDENTIFIER.fullmatch(value)):
            raise _refused(file, name, value, f"must be one name of letters, digits, - and _{fix}")


def _tensors(file: Path, fix: str) -> int:
    """How many tensors a safetensors file lists."""
    where, again = one_line(str(file)), "; get it again"
    with file.open("rb") as source:
        start = source.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= size <= min(_HEADER, file.stat().st_size - 8):
            raise ValueError(f"{where}: is no safetensors file, or is cut short{fix or again}")
        try:
            header = json.loads(source.read(size))
            return len(header.keys() - {"__metadata__"})
        except (ValueError, RecursionError, AttributeError):
            raise ValueError(f"{where}: its header can't be read{fix or again}") from None
