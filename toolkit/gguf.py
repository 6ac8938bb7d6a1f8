"""GGUF files: what is in one, read by our own parser and checked before MLX opens it.

MLX takes some tensor types for others without a word and ends the process at a few, so a file with such a
tensor is refused by name. No weights are read here: that is `gguf_model`'s.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

# Bytes per block and weights per block of every GGUF tensor type, by its number in the file.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 4, 1), 1: ("F16", 2, 1), 2: ("Q4_0", 18, 32), 3: ("Q4_1", 20, 32), 6: ("Q5_0", 22, 32),
    7: ("Q5_1", 24, 32), 8: ("Q8_0", 34, 32), 9: ("Q8_1", 36, 32), 10: ("Q2_K", 84, 256),
    11: ("Q3_K", 110, 256), 12: ("Q4_K", 144, 256), 13: ("Q5_K", 176, 256), 14: ("Q6_K", 210, 256),
    15: ("Q8_K", 292, 256), 16: ("IQ2_XXS", 66, 256), 17: ("IQ2_XS", 74, 256), 18: ("IQ3_XXS", 98, 256),
    19: ("IQ1_S", 50, 256), 20: ("IQ4_NL", 18, 32), 21: ("IQ3_S", 110, 256), 22: ("IQ2_S", 82, 256),
    23: ("IQ4_XS", 136, 256), 24: ("I8", 1, 1), 25: ("I16", 2, 1), 26: ("I32", 4, 1), 27: ("I64", 8, 1),
    28: ("F64", 8, 1), 29: ("IQ1_M", 56, 256), 30: ("BF16", 2, 1), 34: ("TQ1_0", 54, 256),
    35: ("TQ2_0", 66, 256), 39: ("MXFP4", 17, 32), 40: ("NVFP4", 36, 64),
}  # fmt: skip
READABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q6_K")
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: its name, shape (outermost first) and type."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int


@dataclass(frozen=True)
class Header:
    """Metadata and tensor list of a file; no weights."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[Tensor, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def of_family(self, key: str, default: Any = None) -> Any:
        """The metadata value of `<architecture>.<key>`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_header(path: str | Path) -> Header:
    """Metadata and tensors of a GGUF file, after checking that all of it is there.

    Raises
    ------
    ValueError
        Not GGUF, cut short, or a tensor type that nobody has named.
    """
    path = Path(path)
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file (it doesn't begin with the letters GGUF)")
        try:
            version = _scalar(file, "I")
            if version not in (2, 3):
                raise ValueError(f"{path}: GGUF version {version}: must be 2 or 3, little-endian")
            tensor_count, key_count = _scalar(file, "Q"), _scalar(file, "Q")
            metadata = {_string(file): _value(file, _scalar(file, "I")) for _ in range(key_count)}
            tensors = tuple(_tensor(path, file) for _ in range(tensor_count))
        except (struct.error, EOFError, UnicodeDecodeError, OverflowError, MemoryError, KeyError) as error:
            why = str(error) or "cut short"
            raise ValueError(f"{path}: broken GGUF header ({why}); download it again") from None
        start = file.tell()
    align = int(metadata.get("general.alignment", 32))
    start += -start % align
    size = path.stat().st_size
    for t in tensors:
        _, block_bytes, block = next(v for v in TYPES.values() if v[0] == t.type)
        if start + t.offset + int(np.prod(t.shape)) // block * block_bytes > size:
            raise ValueError(f"{path}: the file ends before the end of tensor {t.name}; download it again")
    return Header(path, metadata, tensors)


def check(header: Header) -> None:
    """Refuse what MLX would read wrongly, and families whose layout isn't known here."""
    bad = {t.type: t.name for t in reversed(header.tensors) if t.type not in READABLE}
    if bad:
        kinds = ", ".join(f"{kind} ({name})" for kind, name in sorted(bad.items()))
        raise ValueError(f"{header.path}: tensor type {kinds}: must be one of {', '.join(READABLE)}; "
                         "MLX reads the others wrongly or not at all: convert the file to Q8_0")  # fmt: skip
    if header.architecture not in FAMILIES:
        raise ValueError(f"{header.path}: architecture {header.architecture!r}: "
                         f"must be one of {', '.join(FAMILIES)}")  # fmt: skip
    if header.of_family("expert_count"):
        raise ValueError(f"{header.path}: mixture of experts: must be a dense model")


def _scalar(file: BinaryIO, code: str) -> Any:
    size = struct.calcsize("<" + code)
    return struct.unpack("<" + code, file.read(size))[0]


def _string(file: BinaryIO) -> str:
    size = _scalar(file, "Q")
    raw = file.read(size)
    if len(raw) < size:
        raise EOFError
    return raw.decode("utf-8")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _string(file)
    if kind == 9:
        inner, count = _scalar(file, "I"), _scalar(file, "Q")
        return [_value(file, inner) for _ in range(count)]
    return _scalar(file, _SCALARS[kind])


def _tensor(path: Path, file: BinaryIO) -> Tensor:
    name = _string(file)
    shape = tuple(_scalar(file, "Q") for _ in range(_scalar(file, "I")))[::-1]
    kind, offset = _scalar(file, "I"), _scalar(file, "Q")
    if kind not in TYPES:
        raise ValueError(f"{path}: tensor {name}, type number {kind}: must be one of {', '.join(READABLE)}")
    return Tensor(name, shape, TYPES[kind][0], offset)
