"""Models: the conversion proved by perplexity, tokenizers by round trips, every bad input in one line."""

import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import regex
from helpers import gguf_files as files
from mlx.utils import tree_flatten

import toolkit as tk
from toolkit import backend
from toolkit.models import dtype, fetch

TEXT = (Path(__file__).parents[2] / "data" / "encyclopaedic.txt").read_text()
SAMPLES = [
    "0123456789, 1,234.5 and 3:45",
    "naïve café",
    "🙂 👩‍👩‍👧 🇫🇷",
    "  two  spaces  ",
    " leading",
    "水は化合物である。 한국어",
    "\tif x:\n\n    return x  \n",
    "isn't we'll I'D",
    "",
    "a",
    "\u00a0\u200b",
    "<|im_start|>",
]


def perplexity(model: "tk.Model", text: str = TEXT) -> float:
    ids = mx.array([model.encode(text)])
    logits = model.module(ids)[0, :-1].astype(mx.float32)
    chosen = mx.take_along_axis(logits, ids[0, 1:, None], -1)[:, 0]
    return float(mx.exp(mx.mean(mx.logsumexp(logits, -1) - chosen)))


def assert_converted_right(figure: float) -> None:
    assert figure < 20


def flip_rope(model: "tk.Model") -> None:
    for layer in model.module.layers:
        layer.self_attn.rope.traditional ^= True


@pytest.mark.real
def test_the_conversion_is_right_and_the_test_fails_with_the_wrong_rope(smollm2) -> None:
    right = perplexity(smollm2)
    assert_converted_right(right)
    flip_rope(smollm2)
    try:
        wrong = perplexity(smollm2)
        assert wrong > 5 * right
        with pytest.raises(AssertionError):
            assert_converted_right(wrong)
        # What does not tell them apart, and so is no proof: a sensible continuation.
        ids = smollm2.encode("The capital of France is")
        assert smollm2.decode([int(mx.argmax(smollm2.module(mx.array([ids]))[0, -1]))]) == " Paris"
    finally:
        flip_rope(smollm2)


@pytest.mark.real
def test_interleaved_rope_on_the_file_s_own_row_order_is_the_same_model(smollm2) -> None:
    ids = mx.array([smollm2.encode(TEXT)[:60]])
    right = np.array(smollm2.module(ids)[0])
    config = smollm2.config
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    layers = [layer.self_attn for layer in smollm2.module.layers]
    original = [{part: getattr(layer, part).weight for part in heads} for layer in layers]
    try:
        for layer in layers:
            for part, count in heads.items():
                rows = getattr(layer, part).weight
                split = rows.reshape(count, 2, rows.shape[0] // count // 2, -1)
                getattr(layer, part).weight = split.swapaxes(1, 2).reshape(rows.shape)
        assert np.abs(np.array(smollm2.module(ids)[0]) - right).max() > 1  # rows alone: another model
        flip_rope(smollm2)
        np.testing.assert_allclose(np.array(smollm2.module(ids)[0]), right, atol=1e-3)
        flip_rope(smollm2)
    finally:
        for layer, weights in zip(layers, original, strict=True):
            for part, weight in weights.items():
                getattr(layer, part).weight = weight


@pytest.mark.real
def test_the_default_model_s_parts_are_what_its_package_says(smollm2) -> None:
    assert (smollm2.vocab_size, smollm2.context, smollm2.dtype) == (49152, 8192, "float32")
    assert smollm2.note == "Q4_1 and Q8_0 weights dequantized to float32"
    assert smollm2.eos_ids == {2} and smollm2.token_text(2) == "<|im_end|>"
    assert repr(smollm2).startswith("Model(name='smollm2', vocab_size=49152, context=8192")


@pytest.mark.real
def test_token_ids_equal_those_of_plain_byte_pair_encoding(smollm2) -> None:
    spec = json.loads((fetch.fetch("smollm2") / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(spec["model"]["merges"])}
    table = dict(enumerate(files.byte_vocabulary()["tokenizer.ggml.tokens"][:256]))
    words = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def plain(text: str) -> list[int]:
        out = []
        for piece in regex.findall(r"\p{N}|[^\p{N}]+", text):  # single digits first
            for word in words.findall(piece):
                parts = [table[byte] for byte in word.encode()]
                while len(parts) > 1:
                    pairs = list(pairwise(parts))
                    best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
                    if best not in ranks:
                        break
                    i = pairs.index(best)
                    parts[i : i + 2] = ["".join(best)]
                out += [vocab[part] for part in parts]
        return out

    for text in [TEXT, *SAMPLES[:-1]]:  # not the special token, which is one by itself
        assert smollm2.encode(text) == plain(text), text
    assert smollm2.encode("<|im_start|>") == [1]
    assert smollm2.encode(" 12") != smollm2.encode("12")


@pytest.mark.real
@pytest.mark.parametrize("text", SAMPLES)
def test_the_default_tokenizer_gives_text_back(smollm2, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text


@pytest.mark.parametrize("text", [*SAMPLES, "".join(map(chr, range(0x250)))])
def test_the_byte_tokenizer_gives_text_back_and_its_ids_are_the_bytes(tiny, text: str) -> None:
    assert tiny.encode(text) == list(text.encode())
    assert tiny.decode(tiny.encode(text)) == text


@pytest.mark.real
def test_tokens_read_well_one_by_one(smollm2, tiny) -> None:
    ids = smollm2.encode("The capital is 🙂 水")
    texts = [smollm2.token_text(i) for i in ids]
    assert texts[:3] == ["The", " capital", " is"]
    lone = smollm2.encode("👧")[0]
    assert smollm2.token_text(lone).startswith((r"\x", r" \x"))
    unclear = [i for i in range(smollm2.vocab_size) if "\ufffd" in smollm2.token_text(i)]
    assert unclear == smollm2.encode("\ufffd")  # a token of its own
    assert tiny.token_texts.tolist() == [tiny.token_text(i) for i in range(tiny.vocab_size)]
    assert [tiny.token_text(i) for i in (65, 32, 0xE6, 257, 300)] == ["A", " ", r"\xe6", "<eos>", "<300>"]


@pytest.mark.real
def test_messages_go_through_the_chat_template(smollm2, tiny) -> None:
    ids = smollm2.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}])
    turns = ["<|im_start|>system\nBe brief.<|im_end|>\n", "<|im_start|>user\nHi!<|im_end|>\n"]
    assert smollm2.decode(ids) == "".join(turns) + "<|im_start|>assistant\n"
    assert ids[0] == 1 and ids.count(2) == 2
    assert tiny.decode(tiny.chat([{"role": "user", "content": "Hi!"}])) == "user: Hi!\nassistant:"
    with pytest.raises(ValueError, match="refused by the chat template") as error:
        smollm2.chat([{"role": "user"}])
    assert "\n" not in str(error.value)


def test_a_model_without_a_template_says_so(tmp_path) -> None:
    model = tk.load(files.write_model(tmp_path / "m.gguf", tk.tiny()), progress=False)
    with pytest.raises(ValueError, match=r"model 'm.gguf' has no chat template; give prompt= instead"):
        model.chat([{"role": "user", "content": "Hi!"}])


def probabilities(model: "tk.Model", text: str) -> np.ndarray:
    return np.array(mx.softmax(model.module(mx.array([model.encode(text)]))[0, -1].astype(mx.float32)))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "gemma2", "gpt2", "mamba", "deepseek_v3"])
def test_tiny_is_uncertain_but_not_uniform_and_reads_the_whole_prompt(family: str) -> None:
    model = tk.tiny(model_type=family)
    spread = []
    for text in ("a", "Hello", "The children were playing with a", "zz" * 40):
        p = probabilities(model, text)
        spread.append((p.max(), -(p * np.log(p)).sum(), p.max() / np.median(p)))
    assert max(top for top, _, _ in spread) < 0.35
    assert min(entropy for _, entropy, _ in spread) > 3
    assert min(ratio for _, _, ratio in spread) > 5
    assert np.abs(probabilities(model, "Xello") - probabilities(model, "Hello")).max() > 1e-3


def test_tiny_is_the_same_each_time_and_leaves_the_generator_alone() -> None:
    def weights(model: "tk.Model") -> dict[str, np.ndarray]:
        return {name: np.array(array) for name, array in tree_flatten(model.module.parameters())}

    mx.random.seed(123)
    before = np.array(mx.random.state[0])
    first = [weights(tk.tiny(7, model_type=family)) for family in ("llama", "mamba")]
    np.testing.assert_array_equal(np.array(mx.random.state[0]), before)
    mx.random.seed(5)
    for family, old in zip(("llama", "mamba"), first, strict=True):
        new = weights(tk.tiny(7, model_type=family))
        assert all((new[name] == old[name]).all() for name in old)
    other = weights(tk.tiny(8))
    assert (other["lm_head.weight"] != first[0]["lm_head.weight"]).mean() > 0.99
    mx.random.uniform()
    assert (np.array(mx.random.state[0]) != before).any()  # the measure moves when something draws


@pytest.mark.real
def test_loading_leaves_the_generator_alone() -> None:
    mx.random.seed(321)
    before = np.array(mx.random.state[0])
    tk.load("smollm2", progress=False)
    np.testing.assert_array_equal(np.array(mx.random.state[0]), before)


def test_tiny_refuses_what_it_cannot_make() -> None:
    for family, message in {
        "nonsense": "not supported",
        "dbrx": "missing",
        "gemma4": "million weights",
    }.items():
        with pytest.raises(ValueError, match=rf"model_type='{family}'.*{message}") as error:
            tk.tiny(model_type=family)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"seed=-1: must be an integer in \[0, 2\^64\)"):
        tk.tiny(-1)


@pytest.fixture
def directory(tmp_path) -> Path:
    """A model directory: tiny's weights as converted from a GGUF file."""
    from toolkit.models import gguf_model

    out = tmp_path / "model"
    out.mkdir()
    gguf_model.convert(files.write_model(tmp_path / "m.gguf", tk.tiny(3)), out)
    return out


def quantize(directory: Path, target: Path, **options: int) -> Path:
    """As `mlx_lm.convert` would."""
    from mlx_lm.utils import load, quantize_model, save

    module, tokenizer, config = load(str(directory), return_config=True)
    module, config = quantize_model(module, config, **options)
    save(target, directory, module, tokenizer, config)
    return target


def first_logits(model: "tk.Model") -> np.ndarray:
    return np.array(model.module(mx.array([[72, 101, 108]]))[0, -1].astype(mx.float32))


def test_a_directory_loads_here_and_in_mlx_lm_alike(directory) -> None:
    from mlx_lm.utils import load as mlx_load

    model = tk.load(directory)
    assert model.name == "model"
    np.testing.assert_array_equal(first_logits(model), first_logits(tk.tiny(3)))
    module, tokenizer = mlx_load(str(directory))
    np.testing.assert_array_equal(np.array(module(mx.array([[72, 101, 108]]))[0, -1]), first_logits(model))
    assert tokenizer.encode("Hel") == [72, 101, 108]


@pytest.mark.skipif(
    not backend.on_cpu(), reason="the default differs on a GPU, where packed weights are fast"
)
def test_on_a_cpu_packed_and_16_bit_weights_become_float32_and_it_says_so(
    directory, tmp_path, capsys
) -> None:
    packed = quantize(directory, tmp_path / "packed", group_size=32, bits=4)
    model = tk.load(packed)
    assert "Converting to float32" in capsys.readouterr().err
    assert model.dtype == "float32"
    assert model.note.endswith(
        "4-bit weights dequantized to float32, the only type with fast matmuls on a CPU"
    )
    kept = tk.load(packed, dequantize=False)
    assert dtype.bits_of(kept.module) == "4-bit" and not dtype.bits_of(model.module)
    np.testing.assert_allclose(first_logits(model), first_logits(kept), atol=1e-4)

    half = tk.load(directory, dtype="bfloat16", progress=False)
    assert half.dtype == "bfloat16" and half.note == "float32 weights converted to bfloat16"
    assert capsys.readouterr().err == ""
    from mlx_lm.utils import load, save

    module, tokenizer, config = load(str(directory), return_config=True)
    module.set_dtype(mx.bfloat16)
    save(tmp_path / "half", directory, module, tokenizer, config)
    assert tk.load(tmp_path / "half").dtype == "float32"
    assert tk.load(tmp_path / "half", dequantize=False).dtype == "bfloat16"


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt2"])
@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_every_kind_of_packed_layer_dequantizes_to_the_same_function(family: str, mode: str) -> None:
    import mlx.nn as nn

    sizes = {"mxfp4": {"group_size": 32, "bits": 4}, "affine": {"group_size": 32, "bits": 8}}[mode]
    model = tk.tiny(model_type=family)

    def divides(_: str, layer: nn.Module) -> bool:
        return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0

    nn.quantize(model.module, **sizes, mode=mode, class_predicate=divides)
    packed = first_logits(model)
    assert dtype.bits_of(model.module)
    dtype.convert(model.module, mx.float32, dequantize=True, progress=False)
    assert not dtype.bits_of(model.module)
    np.testing.assert_allclose(first_logits(model), packed, atol=2e-3)


def test_a_bad_name_or_directory_is_one_clear_line(directory, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    broken = {name: shutil.copytree(directory, tmp_path / name) for name in ("cut", "kind", "bare", "words")}
    data = (broken["cut"] / "model.safetensors").read_bytes()
    (broken["cut"] / "model.safetensors").write_bytes(data[:-1000])
    config = json.loads((directory / "config.json").read_text())
    (broken["kind"] / "config.json").write_text(json.dumps(config | {"model_type": "nonsense"}))
    (broken["bare"] / "model.safetensors").unlink()
    (broken["words"] / "tokenizer.json").unlink()
    (tmp_path / "empty").mkdir()
    cases = {
        "smollm9": "model='smollm9': must be tiny, smollm2, a model directory, a .gguf file or a Hub id",
        "": "model='': must be tiny",
        str(tmp_path / "none.gguf"): "no such file",
        str(tmp_path / "none"): "must be tiny",
        str(tmp_path / "empty"): "has no config.json",
        str(broken["cut"]): "can't be loaded",
        str(broken["kind"]): "can't be loaded",
        str(broken["words"]): "can't be loaded",
        str(broken["bare"]): "has no model",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message) as error:
            tk.load(name, progress=False)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="dtype='int8': must be one of float32, float16, bfloat16"):
        tk.load("tiny", dtype="int8")


def test_a_hub_id_without_a_network_says_what_to_do(tmp_path) -> None:
    # In a process of its own: the Hub's client reads its settings when imported.
    code = "import toolkit as tk\ntry: tk.load('nobody/nothing')\nexcept ValueError as e: print(e)"
    env = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True,
                         cwd=Path(__file__).parents[2]).stdout  # fmt: skip
    assert out.startswith("model='nobody/nothing': not in the local Hub cache")
    assert "hf download nobody/nothing" in out and out.count("\n") == 1


def test_text_that_is_no_text_is_refused(tiny) -> None:
    for text in (None, 7, "\ud800"):
        with pytest.raises(ValueError, match="must be a string of valid Unicode"):
            tiny.encode(text)
