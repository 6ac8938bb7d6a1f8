"""GGUF: types checked before MLX opens a file, weights exact, rows in order, tokenizers equal."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from helpers import gguf_files as files
from mlx.utils import tree_flatten

import toolkit as tk
from toolkit.models import dtype, gguf, gguf_model, gguf_tokenizer

IDS = mx.array([[72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]])


def logits(model: "tk.Model") -> np.ndarray:
    return np.array(model.module(IDS).astype(mx.float32))[0]


@pytest.mark.parametrize("kind", gguf.READABLE)
def test_a_readable_type_gives_the_weights_that_the_format_says(kind: str, tmp_path) -> None:
    data = files.random_blocks(kind, 16 * 256)
    tensor = {"blk.0.attn_v.weight": ((16, 256), files.NUMBER[kind], data),
              "token_embd.weight": ((1, 32), 0, bytes(128))}  # fmt: skip
    metadata = files.model_metadata(tk.tiny().config)
    header = gguf.read_header(files.write(tmp_path / "m.gguf", metadata, tensor))
    got = np.array(gguf_model.weights(header)["model.layers.0.self_attn.v_proj.weight"])
    right = files.dequantize(kind, data).reshape(16, 256)
    # MLX expands the K types to float16, so those are right to half precision; all others are exact.
    tolerance = 1e-3 if kind.endswith("_K") else 0.0
    np.testing.assert_allclose(got, right, rtol=tolerance, atol=tolerance * np.abs(right).max())
    assert not np.allclose(got, right[:, ::-1], atol=tolerance)  # the measure can tell


@pytest.mark.parametrize("number", [*sorted(set(gguf.TYPES) - set(files.NUMBER.values())), 77])
def test_any_other_type_is_refused_by_name_before_mlx_opens_the_file(number, tmp_path, monkeypatch) -> None:
    path = files.write(tmp_path / "m.gguf", files.model_metadata(tk.tiny().config),
                       {"token_embd.weight": ((2, 256), 0, bytes(2048)),
                        "blk.0.ffn_up.weight": ((1, 256), number, bytes(2048))})  # fmt: skip
    monkeypatch.setattr(mx, "load", lambda *_, **__: pytest.fail("MLX opened it"))
    name = gguf.TYPES.get(number, "number 77")
    with pytest.raises(
        ValueError, match=rf"tensor type {name} \(blk.0.ffn_up.weight\): must be one of"
    ) as error:
        tk.load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", gguf.FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_family_s_logits_survive_the_file(family: str, tied: bool, tmp_path) -> None:
    model = tk.tiny(5, model_type=family, tie_word_embeddings=tied)
    loaded = tk.load(files.write_model(tmp_path / "m.gguf", model), progress=False)
    assert loaded.note == ""
    np.testing.assert_array_equal(logits(loaded), logits(model))
    assert loaded.encode("Hello") == model.encode("Hello")
    assert loaded.eos_ids == model.eos_ids
    assert loaded.context == model.context
    if family == "llama":  # rows as transformers has them are wrong here, and it shows
        wrong = tk.load(files.write_model(tmp_path / "w.gguf", model, permute=False), progress=False)
        assert np.abs(logits(wrong) - logits(model)).max() > 0.1


def test_head_dim_need_not_be_hidden_size_over_heads(tmp_path) -> None:
    model = tk.tiny(1, model_type="qwen3", head_dim=32)
    loaded = tk.load(files.write_model(tmp_path / "m.gguf", model), progress=False)
    np.testing.assert_array_equal(logits(loaded), logits(model))


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_packed_weights_stay_packed_or_become_float32_with_the_same_values(kind: str, tmp_path) -> None:
    path = files.write_model(tmp_path / "m.gguf", tk.tiny(2), kind)
    packed = tk.load(path, dequantize=False, progress=False)
    plain = tk.load(path, dequantize=True, dtype="float32", progress=False)
    assert packed.dtype == "float16"
    assert plain.dtype == "float32" and kind in plain.note
    assert any(name.endswith("scales") for name, _ in tree_flatten(packed.module.parameters()))
    np.testing.assert_allclose(logits(packed), logits(plain), atol=0.05)
    dtype.convert(packed.module, mx.float32, dequantize=True, progress=False)
    expected = dict(tree_flatten(plain.module.parameters()))
    for name, array in tree_flatten(packed.module.parameters()):
        np.testing.assert_allclose(np.array(array), np.array(expected[name]), atol=1e-7, err_msg=name)


def llama3_factors(factor: float, base: float = 10000.0, half: int = 8) -> np.ndarray:
    out = []
    for i in range(half):  # one frequency at a time, as llama.cpp's converter does
        wavelength = 2 * np.pi * base ** (i / half)
        if wavelength < 8192 / 4:
            out.append(1.0)
        elif wavelength > 8192:
            out.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, "<f4")


def test_llama_3_s_rope_factors_become_its_config(tmp_path) -> None:
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    model = tk.tiny(4, rope_scaling=scaling, rope_theta=500000.0)
    path = files.write_model(tmp_path / "m.gguf", model)
    bare = tk.load(path, progress=False)
    factors = llama3_factors(32.0, 500000.0)
    path = files.write_model(path, model, extra={"rope_freqs.weight": factors})
    loaded = tk.load(path, progress=False)
    assert loaded.config["rope_scaling"] == scaling
    np.testing.assert_allclose(logits(loaded), logits(model), atol=1e-5)
    far = mx.arange(200)[None] % 250
    right, without = (np.array(m.module(far))[0, -1] for m in (loaded, bare))
    assert np.abs(right - without).max() > 1e-3
    path = files.write_model(path, model, extra={"rope_freqs.weight": factors * np.linspace(1, 2, 8)})
    with pytest.raises(ValueError, match=r"rope_freqs.weight: not Llama 3's rule"):
        tk.load(path, progress=False)


def test_what_cannot_be_read_right_is_refused_in_one_line(tmp_path) -> None:
    model = tk.tiny()
    whole = files.write_model(tmp_path / "whole.gguf", model).read_bytes()
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "short.gguf").write_bytes(whole[:-5000])
    (tmp_path / "head.gguf").write_bytes(whole[:900])
    (tmp_path / "old.gguf").write_bytes(whole[:4] + bytes([1]) + whole[5:])
    changes = {
        "gemma.gguf": (
            {"general.architecture": "gemma"},
            "architecture 'gemma': must be one of llama, qwen2",
        ),
        "moe.gguf": ({"llama.expert_count": 8}, "mixture of experts"),
        "part.gguf": ({"split.count": 3}, "one of 3 parts"),
        "heads.gguf": (
            {"llama.attention.head_count": [4, 4]},
            "attention.head_count=.4, 4.: must be a number",
        ),
        "pre.gguf": ({"tokenizer.ggml.pre": "poro-chat"}, "pre-tokenizer 'poro-chat': must be one of smollm"),
        "rope.gguf": ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        "spm.gguf": ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert'"),
    }
    messages = {"text.gguf": "not a GGUF file", "short.gguf": "ends before the end of tensor",
                "head.gguf": "broken GGUF header", "old.gguf": "GGUF version 1"}  # fmt: skip
    for name, (metadata, message) in changes.items():
        files.write_model(tmp_path / name, model, metadata=metadata)
        messages[name] = message
    for name, message in messages.items():
        with pytest.raises(ValueError, match=message) as error:
            tk.load(tmp_path / name, progress=False)
        assert "\n" not in str(error.value) and name in str(error.value)
    assert tk.load(tmp_path / "whole.gguf", progress=False).vocab_size == 258


def test_a_header_cut_anywhere_is_refused_and_never_hangs(tmp_path) -> None:
    whole = files.write_model(tmp_path / "whole.gguf", tk.tiny()).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(4, 400, 7), *range(400, 8000, 501)]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut short|ends before"):
            gguf.read_header(path)


def test_sentencepiece_ids_equal_sentencepiece_s_own(tmp_path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="pip install sentencepiece")
    text = (Path(__file__).parents[2] / "data" / "encyclopaedic.txt").read_text()
    (tmp_path / "text.txt").write_text(text)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "m"), model_type="bpe", vocab_size=500,
        byte_fallback=True, character_coverage=0.99, normalization_rule_name="identity",
        remove_extra_whitespaces=False, split_digits=True, minloglevel=2,
    )  # fmt: skip
    own = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    size = own.get_piece_size()
    kind = [
        2 if own.is_unknown(i) else 3 if own.is_control(i) else 6 if own.is_byte(i) else 1
        for i in range(size)
    ]
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [own.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [own.get_score(i) for i in range(size)], "tokenizer.ggml.token_type": kind,
        "tokenizer.ggml.bos_token_id": own.bos_id(), "tokenizer.ggml.eos_token_id": own.eos_id(),
        "tokenizer.ggml.unknown_token_id": own.unk_id(),
    }  # fmt: skip
    built = gguf_tokenizer.build(metadata)
    for sample in [
        *text.split(". "),
        "  two  spaces",
        "naïve café 🙂 水は",
        "in 1789, at 3:45",
        "",
        "x",
        "\n\t tab",
    ]:
        ids = built.encode(sample).ids
        assert ids == [own.bos_id(), *own.encode(sample)], sample
        assert built.decode(ids) == own.decode(own.encode(sample))
