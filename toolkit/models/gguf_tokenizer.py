"""The tokenizer inside a GGUF file, as the `tokenizer.json` and `tokenizer_config.json` of its model.

Reads metadata only. A file names its pre-tokenizer but doesn't carry it, and a wrong one gives plausible
wrong ids, so one that isn't known here is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CONTROL, USER_DEFINED = 3, 4  # token types of the format

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


# By the name in tokenizer.ggml.pre. Single digits, then GPT-2's words, for SmolLM.
PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()]),
    "gpt-2": _byte_level,
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
}


def build(metadata: dict[str, Any], where: str = "GGUF") -> Tokenizer:
    """A tokenizer equal to the one that the file describes.

    Raises
    ------
    ValueError
        A kind of tokenizer, or a pre-tokenizer, that isn't known here.
    """
    kind = metadata.get("tokenizer.ggml.model")
    pieces = metadata.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama") or not pieces:
        raise ValueError(f"{where}: tokenizer {kind!r}: must be gpt2 (byte-level) or llama (SentencePiece)")
    tokenizer = _bytes_bpe(metadata, pieces, where) if kind == "gpt2" else _sentencepiece(metadata, pieces)
    types = metadata.get("tokenizer.ggml.token_type") or []
    tokenizer.add_tokens([AddedToken(piece, special=number == CONTROL, normalized=False)
                          for piece, number in zip(pieces, types, strict=False)
                          if number in (CONTROL, USER_DEFINED)])  # fmt: skip
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        one = processors.TemplateProcessing(single=f"{pieces[bos]} $A", pair=f"{pieces[bos]} $A $B",
                                            special_tokens=[(pieces[bos], bos)])  # fmt: skip
        byte_level = processors.ByteLevel(trim_offsets=False)
        tokenizer.post_processor = one if kind == "llama" else processors.Sequence([byte_level, one])
    return tokenizer


def _bytes_bpe(metadata: dict[str, Any], pieces: list[str], where: str) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"{where}: pre-tokenizer {pre!r}: must be one of {', '.join(PRE_TOKENIZERS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _sentencepiece(metadata: dict[str, Any], pieces: list[str]) -> Tokenizer:
    """SentencePiece's BPE joins the pair whose union scores highest; merges in that order say the same."""
    scores = metadata["tokenizer.ggml.scores"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for piece, i in vocab.items():
        halves = ((piece[:k], piece[k:]) for k in range(1, len(piece)))
        pairs = [(left, right) for left, right in halves if left in vocab and right in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(-scores[i], i, pair) for pair in pairs]
    merges.sort(key=lambda merge: merge[:2])
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    pairs = [pair for _, _, pair in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, unk_token=pieces[unknown], fuse_unk=True,
                                     byte_fallback=True))  # fmt: skip
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if prefix else steps)
    tail = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    return tokenizer


def write(metadata: dict[str, Any], directory: Path, where: str = "GGUF") -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (chat template included) to a directory."""
    tokenizer = build(metadata, where)
    tokenizer.save(str(directory / "tokenizer.json"))
    pieces = metadata["tokenizer.ggml.tokens"]
    out: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length", 2048),
    }
    for role, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and token < len(pieces):
            out[f"{role}_token"] = pieces[token]
    if template := metadata.get("tokenizer.chat_template"):
        out["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(out, indent=2, ensure_ascii=False))
