"""GGUF files: what is in one, read by our own parser and checked before MLX opens it.

MLX takes some tensor types for others without a word and ends the process at a few, so a file with such a
tensor is refused by name. No weights are read here: that is `gguf_model`'s.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

# Every tensor type that the format has had, by its number in the file.
TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 4: "Q4_2", 5: "Q4_3", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0",
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 31: "Q4_0_4_4", 32: "Q4_0_4_8",
    33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
    39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
# Those that MLX reads right: bytes and weights per block.
READABLE = {"F32": (4, 1), "F16": (2, 1), "BF16": (2, 1), "Q4_0": (18, 32), "Q4_1": (20, 32),
            "Q8_0": (34, 32), "Q2_K": (84, 256), "Q6_K": (210, 256)}  # fmt: skip
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
    data: int  # where in the file the tensors' offsets count from

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
        Not GGUF, or cut short.
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
            tensors = tuple(_tensor(file) for _ in range(tensor_count))
        except (struct.error, EOFError, UnicodeDecodeError, OverflowError, MemoryError, RecursionError,
                LookupError) as error:  # fmt: skip
            why = "cut short" if isinstance(error, struct.error | EOFError) else type(error).__name__
            raise ValueError(f"{path}: broken GGUF header ({why}); download it again") from None
        start = file.tell()
    align = int(metadata.get("general.alignment", 32))
    start += -start % align
    size = path.stat().st_size
    for t in tensors:
        block_bytes, block = READABLE.get(t.type, (0, 1))
        if start + t.offset + math.prod(t.shape) // block * block_bytes > size:
            raise ValueError(f"{path}: the file ends before the end of tensor {t.name}; download it again")
    return Header(path, metadata, tensors, start)


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
    if (parts := header.metadata.get("split.count", 1)) > 1:
        raise ValueError(f"{header.path}: one of {parts} parts: must be whole; join them with "
                         "llama-gguf-split --merge")  # fmt: skip
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


def _tensor(file: BinaryIO) -> Tensor:
    name = _string(file)
    shape = tuple(_scalar(file, "Q") for _ in range(_scalar(file, "I")))[::-1]
    kind, offset = _scalar(file, "I"), _scalar(file, "Q")
    return Tensor(name, shape, TYPES.get(kind, f"number {kind}"), offset)
