"""Models: `load` turns a name into a model and its tokenizer, ready to run on the device at hand.

Everything above sees only `Model`: an mlx-lm module, wherever it came from. Fetching the default model is
`fetch`'s, reading GGUF `gguf`'s, other number types `dtype`'s. Loading doesn't move the global random
generator.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from html import escape
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .. import backend
from . import dtype as dtypes
from . import gguf, gguf_model, gguf_tokenizer
from . import tiny as tiny_model
from .directory import check as check_directory
from .directory import globbable
from .fetch import FetchError, fetch, manifest

# A model's own Python code is never run: its tokenizer is one of transformers', its architecture of mlx-lm's.
_NO_CODE: dict[str, Any] = {"tokenizer_config": {"trust_remote_code": False}, "trust_remote_code": False}
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True, eq=False)
class Model:
    """A language model with its tokenizer.

    Attributes
    ----------
    name : str
        What it was loaded as.
    module : nn.Module
        An mlx-lm model: `module(ids [rows, length], cache=None)` gives logits [rows, length, vocab].
    tokenizer : mlx_lm.tokenizer_utils.TokenizerWrapper
    vocab_size : int
        Width of the logits; some models have more than the tokenizer has tokens.
    context : int or None
        Longest sequence, where the model says.
    eos_ids : frozenset of int
        Tokens that end an output.
    config : dict
        The model's config.json.
    dtype : str
        Type of the weights; of quantized ones, their scales'.
    note : str
        Empty, or what was done to the weights and why.
    pid : int
        The process that loaded it; one forked from that can't compute with it.
    """

    name: str
    module: nn.Module = field(repr=False)
    tokenizer: Any = field(repr=False)
    vocab_size: int
    context: int | None
    eos_ids: frozenset[int]
    config: dict[str, Any] = field(repr=False)
    dtype: str
    note: str = ""
    pid: int = field(default_factory=os.getpid, repr=False)

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text: no chat template; BOS only where the tokenizer always adds it."""
        bos = self.tokenizer.bos_token
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=not (bos and text.startswith(bos)))
        except (UnicodeEncodeError, TypeError, AttributeError):
            raise ValueError(f"text={text!r:.60}: must be a string of valid Unicode") from None
        return [int(i) for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that make no character become U+FFFD."""
        return str(self.tokenizer.decode([int(i) for i in ids]))

    @cached_property
    def token_texts(self) -> np.ndarray:
        """`token_text` of every token, made once: some tens of thousands, half a second's work."""
        return np.array([self.token_text(t) for t in range(self.vocab_size)], dtype=object)

    def token_text(self, token: int) -> str:
        """One token for a reader: leading space kept, bytes that make no character as \\\\xNN."""
        known = self._known_texts.get(token)
        if known is None:
            known = self._known_texts[token] = self._text_of(token)
        return known

    @cached_property
    def _known_texts(self) -> dict[int, str]:
        return {}  # at most one entry per token id

    def _text_of(self, token: int) -> str:
        if not 0 <= token < len(self.tokenizer):
            return f"<{token}>"
        piece, text = self.tokenizer.convert_ids_to_tokens(int(token)), self.decode([token])
        if piece.startswith("▁"):  # SentencePiece's space, which decoding drops at the start of a text
            return piece.replace("▁", " ")
        if "\ufffd" not in text:
            return text
        if piece.startswith("<0x"):
            return rf"\x{piece[3:5].lower()}"
        table = {character: byte for byte, character in enumerate(tiny_model.byte_characters())}
        return bytes(table[c] for c in piece if c in table).decode("utf-8", "backslashreplace")

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of messages in the model's chat template, ready for the assistant's answer."""
        if not self.tokenizer.has_chat_template:
            raise ValueError(f"messages: model {self.name!r} has no chat template; give prompt= instead")
        try:
            ids = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        except Exception as error:  # whatever the template raises
            raise ValueError(f"messages={messages!r:.80}: refused by the chat template of {self.name!r}: "
                             f"{_line(error)}") from None  # fmt: skip
        return [int(i) for i in ids]

    def _repr_html_(self) -> str:
        return f"<code>{escape(repr(self))}</code>"


def load(name: str | Path = "smollm2", *, dtype: str | mx.Dtype | None = None, dequantize: bool | None = None,
         progress: bool = True) -> Model:  # fmt: skip
    """A model by name, ready to run.

    Parameters
    ----------
    name : str or Path
        "smollm2" (fetched the first time), "tiny" (random weights), a model directory, a `.gguf` file of the
        llama, qwen2 or qwen3 family, or a Hugging Face Hub id ("owner/model").
    dtype : {"float32", "float16", "bfloat16"}, optional
        Type of the weights. Default: as stored; on a CPU float32, the only fast one there.
    dequantize : bool, optional
        Whether quantized weights are expanded. Default: on a CPU only. With False and no `dtype`, everything
        stays as stored.
    progress : bool
        Show a bar for what takes long.

    Raises
    ------
    ValueError
        Unknown name, unreadable files, or weights that can't be read right (`fetch.FetchError`, a
        ValueError too, where something can't be downloaded).
    """
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    kind = DTYPES[dtype] if isinstance(dtype, str) else dtype
    with dtypes.untouched_generator():
        expand = backend.on_cpu() if dequantize is None else dequantize
        module, tokenizer, config = _open(str(name), expand, progress)
        note = _prepare(module, kind, dequantize, progress)
    if kinds := config.get("gguf_types"):
        note = f"{' and '.join(kinds)} weights dequantized to float32" + (f"; {note}" if note else "")
    return _model(Path(name).name if Path(name).exists() else str(name), module, tokenizer, config, note)


@cache
def loaded(name: str = "smollm2") -> Model:
    """A model by name, loaded once in a process and the same one ever after.

    For studies that run in many processes: what crosses over is the name.

    Parameters
    ----------
    name : str
        As for `load`.
    """
    return load(name, progress=False)


def tiny(seed: int = 0, *, model_type: str = "llama", **config: Any) -> Model:
    """A small model with random weights and a byte tokenizer, made in milliseconds.

    Parameters
    ----------
    seed : int
        Other weights. The global generator isn't used.
    model_type : str
        Any family that mlx-lm has: "llama", "qwen3", "mixtral", "mamba"...
    **config
        Changes to the family's configuration, such as `num_hidden_layers=3`.
    """
    with dtypes.untouched_generator():
        module, full = tiny_model.build(seed, model_type, config)
    return _model("tiny", module, tiny_model.byte_tokenizer(), full, "")


def _open(name: str, dequantize: bool, progress: bool) -> tuple[nn.Module, Any, dict[str, Any]]:
    path = Path(name).expanduser()
    if name == "tiny":
        module, config = tiny_model.build(0, "llama", {})
        return module, tiny_model.byte_tokenizer(), config
    if name in manifest():
        return _open_directory(fetch(name, progress=progress), "; delete that directory to fetch it again")
    if name and path.is_dir():
        return _open_directory(path)
    if path.suffix == ".gguf":
        return _open_gguf(path, dequantize, progress)
    if name.count("/") == 1 and name[0] not in "./~" and not path.exists():
        return _open_hub(name)
    raise ValueError(f"model={name!r}: must be tiny, {', '.join(manifest())}, a model directory, a .gguf "
                     "file or a Hub id (owner/model)")  # fmt: skip


def _open_directory(path: Path, fix: str = "") -> tuple[nn.Module, Any, dict[str, Any]]:
    from mlx_lm.utils import load as load_directory

    check_directory(path, fix)
    try:
        with globbable(path) as place:
            return load_directory(str(place), lazy=True, return_config=True, **_NO_CODE)
    except (Exception, SystemExit) as error:  # whatever json, safetensors, mlx-lm or transformers say
        raise ValueError(f"model={str(path)!r}: can't be loaded: {_line(error)}{fix}") from None


def _open_gguf(path: Path, dequantize: bool, progress: bool) -> tuple[nn.Module, Any, dict[str, Any]]:
    from mlx_lm.tokenizer_utils import load as load_tokenizer
    from mlx_lm.utils import _get_classes, infer_quant_config

    if not path.is_file():
        raise ValueError(f"model={str(path)!r}: no such file")
    header = gguf.read_header(path)
    weights = gguf_model.weights(header, dequantize=dequantize, progress=progress)
    config = gguf_model.config(header)
    if dequantize:
        config["gguf_types"] = gguf_model.quantized_types(header)
    with tempfile.TemporaryDirectory() as directory:
        gguf_tokenizer.write(header.metadata, Path(directory), str(path))
        tokenizer = load_tokenizer(Path(directory), _NO_CODE["tokenizer_config"], config.get("eos_token_id"))
    kind, arguments = _get_classes(config)
    module = kind(arguments.from_dict(config))
    nn.quantize(module, class_predicate=lambda name, layer: (
        f"{name}.scales" in weights and infer_quant_config(name, layer, weights)))  # fmt: skip
    module.eval()
    try:
        module.load_weights(list(weights.items()))
    except ValueError as error:
        raise ValueError(f"model={str(path)!r}: {_line(error)}") from None
    if not dequantize and dtypes.bits_of(module):
        module.set_dtype(mx.float16)  # norms are float32 in the file: they'd widen every activation
    return module, tokenizer, config


def _open_hub(name: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    from mlx_lm.utils import load as load_hub

    try:
        return load_hub(name, lazy=True, return_config=True, **_NO_CODE)
    except RepositoryNotFoundError:
        raise ValueError(f"model={name!r}: not on the Hub, or private (run: hf auth login)") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise FetchError(f"model={name!r}: not in the local Hub cache, and the Hub can't be reached "
                         f"({_line(error)}); run `hf download {name}` where there is a network and copy "
                         "HF_HOME here, or give a directory") from None  # fmt: skip
    except (Exception, SystemExit) as error:
        raise ValueError(f"model={name!r}: can't be loaded: {_line(error)}") from None


def _prepare(module: nn.Module, dtype: mx.Dtype | None, dequantize: bool | None, progress: bool) -> str:
    """Bring the weights to the type wanted, and say what was done."""
    on_cpu, stored, bits = backend.on_cpu(), dtypes.dtype_of(module), dtypes.bits_of(module)
    if dtype is None:
        dtype = mx.float32 if on_cpu and dequantize is not False else stored
    expand = bool(bits) and (on_cpu if dequantize is None else dequantize)
    if dtype == stored and not expand:
        mx.eval(module.parameters())
        return ""
    dtypes.convert(module, dtype, dequantize=expand, progress=progress)
    was = f"{bits} weights dequantized" if expand else f"{dtypes.name_of(stored)} weights converted"
    why = ", the only type with fast matmuls on a CPU" if on_cpu and dtype == mx.float32 else ""
    return f"{was} to {dtypes.name_of(dtype)}{why}"


def _model(name: str, module: nn.Module, tokenizer: Any, config: dict[str, Any], note: str) -> Model:
    eos = config.get("eos_token_id")
    eos_ids = {*tokenizer.eos_token_ids, *([eos] if isinstance(eos, int) else eos or [])}
    text = config.get("text_config") or config
    context = next((text[k] for k in ("max_position_embeddings", "n_positions", "n_ctx", "seq_length",
                                      "max_seq_len") if text.get(k)), None)  # fmt: skip
    try:
        width = module(mx.zeros((1, 1), mx.int32)).shape[-1]  # only the shape: nothing is computed
    except Exception as error:  # values of a type or size that its layers don't take
        raise ValueError(
            f"model={name!r}: its configuration doesn't fit its layers: {_line(error)}"
        ) from None
    return Model(name, module, tokenizer, width, context, frozenset(eos_ids), config,
                 dtypes.name_of(dtypes.dtype_of(module)), note)  # fmt: skip


def _line(error: BaseException) -> str:
    """The first line of somebody else's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:300]
