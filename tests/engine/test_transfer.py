"""A row in a file: it goes on elsewhere as it would have here, and where it can't, one line says why."""

import json
import os

import mlx.core as mx
import numpy as np
import pytest

import toolkit as tk
from toolkit import backend, noise
from toolkit.engine.transfer import checksum, signature
from toolkit.forward.packed import PackedForward
from toolkit.forward.shapes import Shapes

FIELDS = ("tokens", "text", "finish_reason", "logprobs", "margins", "max_drift", "top_logprobs", "seed",
          "choice", "prompt_tokens", "cached", "resumed")  # fmt: skip


def request(id="a", seed=4, **fields):
    return tk.Request("The children were playing with a", id=id, seed=seed, **{"max_tokens": 8, **fields})


def same(one, other):
    return all(getattr(one, name) == getattr(other, name) for name in FIELDS)


def begun(model, one, steps, **how):
    made = tk.Engine(model, **how)
    made.submit(one)
    for _ in range(steps):
        made.step()
    return made


@pytest.mark.parametrize("steps", [0, 1, 3, 7])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 3, "top_k": 2},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"stop": "AB", "logit_bias": {65: 8.0, 66: 8.0}},
        {"generated": [1, 2], "cached": 5},
        {"temperature": 0, "logprobs": 1},
        {"seed": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("budget", [5, 0])
def test_an_exported_row_goes_on_elsewhere_as_it_would_have_here(tiny, tmp_path, fields, steps, budget):
    one = request(**fields)
    for count in range(steps, -1, -1):  # fewer where it has finished by then
        here = begun(tiny, one, count, token_budget=budget)
        if "a" in {row.id for row in (*here.queue, *here.running.values())}:
            break
    here.export_row("a", tmp_path / "row")
    assert here.run()[:] == tk.Engine(tiny).run()[:]  # it has left
    there = tk.Engine(tiny, pipeline=True)
    there.submit(request("other", 5))
    assert there.import_row(tmp_path / "row") == "a"
    done = there.run()
    seed = done["a"].seed
    alone = tk.Engine(tiny)
    alone.submit(one.replace(seed=seed))
    assert same(done["a"], alone.run()["a"])
    assert [e.event for e in here.trace if e.row == "a"][-1] == "export"
    assert "import" in [e.event for e in there.trace if e.row == "a"]


def test_each_choice_is_a_row_of_its_own(tiny, tmp_path):
    expected = tk.generate(tiny, [request(n=3)])
    here, there = begun(tiny, request(n=3), 3), tk.Engine(tiny)
    for choice in (2, 0):
        here.export_row("a", tmp_path / f"{choice}", choice)
        there.import_row(tmp_path / f"{choice}")
    done = [*here.run(), *there.run()]
    assert sorted(c.choice for c in done) == [0, 1, 2]
    assert all(same(c, expected["a", c.choice]) for c in done)


def test_a_row_may_come_back_to_the_engine_that_it_left(tiny, tmp_path):
    made = begun(tiny, request(), 3)
    made.export_row("a", tmp_path / "row")
    assert made.idle
    made.import_row(tmp_path / "row")
    assert same(made.run()["a"], tk.generate(tiny, [request()])["a"])


def test_a_row_that_is_there_already_is_refused_and_the_file_stays_good(tiny, tmp_path):
    here = begun(tiny, request(), 3)
    here.export_row("a", tmp_path / "row")
    there = begun(tiny, request(seed=99), 2)
    with pytest.raises(ValueError, match='id="a": is in the engine already'):
        there.import_row(tmp_path / "row")
    there.run()
    there.import_row(tmp_path / "row")
    assert same(there.run()["a"], tk.generate(tiny, [request()])["a"])


def refusal(engine, path):
    with pytest.raises(ValueError) as raised:
        engine.import_row(path)
    assert "\n" not in str(raised.value)
    assert engine.idle
    return str(raised.value).replace(str(path), "FILE")


def test_another_model_type_stream_or_shape_is_refused_with_one_line(tiny, tmp_path, monkeypatch):
    path = tmp_path / "row"
    begun(tiny, request(), 3).export_row("a", path)
    said = refusal(tk.Engine(tk.tiny(1)), path)  # the same shape, other weights
    assert said.startswith(f"FILE: model=tiny ({signature(tiny)[:8]}): must be this engine's, tiny (")
    deeper = tk.tiny(0, num_hidden_layers=3)
    assert refusal(tk.Engine(deeper), path).startswith("FILE: model=tiny (")
    half = tk.load("tiny", dtype="bfloat16")
    assert refusal(tk.Engine(half, invariant=False), path) == (
        "FILE: dtype=float32: must be this engine's, bfloat16"
    )
    other = tk.Engine(tiny)
    other.forward = PackedForward(tiny, Shapes(16, 8, 4, 256))
    assert refusal(other, path).startswith("FILE: shapes={")
    monkeypatch.setattr(noise, "STREAM", noise.STREAM + 1)
    assert (
        refusal(tk.Engine(tiny), path)
        == f"FILE: stream={noise.STREAM - 1}: must be this engine's, {noise.STREAM}"
    )


def test_what_is_no_exported_row_is_refused_with_one_line(tiny, tmp_path):
    made = tk.Engine(tiny)
    assert refusal(made, tmp_path / "none") == "FILE: is not an exported row: no such file"
    (tmp_path / "text").write_text("not tensors at all")
    assert refusal(made, tmp_path / "text").startswith("FILE: is not an exported row: ")
    mx.save_safetensors(str(tmp_path / "weights.safetensors"), {"a": mx.zeros((2,))})
    assert refusal(made, tmp_path / "weights.safetensors").startswith("FILE: is not an exported row: ")
    for about in ("[1]", '{"format": 1}', '{"format": 1, "model": [], "shapes": {}}'):
        mx.save_safetensors(str(tmp_path / "odd.safetensors"), {"a": mx.zeros((2,))}, {"row": about})
        assert refusal(made, tmp_path / "odd.safetensors").startswith("FILE: is not an exported row: ")
    begun(tiny, request(), 3).export_row("a", tmp_path / "row")
    whole = (tmp_path / "row").read_bytes()
    for size in (10, len(whole) // 2, len(whole) - 5):
        (tmp_path / "part").write_bytes(whole[:size])
        assert refusal(made, tmp_path / "part").startswith("FILE: is not an exported row: ")


def test_rows_whose_stream_cannot_be_continued_elsewhere_stay(tiny, tmp_path):
    for how, one, why in (
        ({"policy": "global"}, request(), 'policy="global": can\'t export a row: its generator stays'),
        ({"forward": "padded"}, request(), 'forward="padded": can\'t export a row'),
        ({}, request(processors=[lambda tokens, logits: logits]), "functions have no JSON form"),
    ):
        made = begun(tiny, one, 2, **how)
        with pytest.raises(ValueError, match=why.replace("(", r"\(")):
            made.export_row("a", tmp_path / "row")
        assert not list(tmp_path.iterdir())
        assert made.run()["a"].finish_reason in ("length", "eos")
    with pytest.raises(ValueError, match='id="b": no such request'):
        made.export_row("b", tmp_path / "row")


def test_a_file_is_whole_or_not_there(tiny, tmp_path, monkeypatch):
    path = tmp_path / "row"
    path.write_text("what was there")
    made = begun(tiny, request(), 3)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        made.export_row("a", path)
    monkeypatch.undo()
    assert path.read_text() == "what was there"
    assert [p.name for p in tmp_path.iterdir()] == ["row"]
    made.export_row("a", path)  # it is still there to be exported
    assert same(_imported(tiny, path), tk.generate(tiny, [request()])["a"])


def _imported(model, path):
    made = tk.Engine(model)
    made.import_row(path)
    return made.run()[0]


def test_the_file_is_safetensors_with_readable_json(tiny, tmp_path):
    begun(tiny, request(seed=-1), 3).export_row("a", tmp_path / "row")
    arrays, metadata = mx.load(str(tmp_path / "row"), format="safetensors", return_metadata=True)
    about = json.loads(metadata["row"])
    assert about["request"] == request(seed=-1).to_json()
    assert about["stream"] == noise.STREAM
    assert about["row"]["seed"] == -1
    assert len(about["drawn"]["logprobs"]) == 3
    length = about["row"]["kept"]
    assert {name: a.shape for name, a in arrays.items()} == {
        f"{kind}{layer}": (2, length, 16) for kind in "kv" for layer in (0, 1)
    }
    assert backend.info().blas not in json.dumps(about)  # nothing of the machine


def altered(path, change, arrays=None):
    """The exported row with one thing about it, or its arrays, changed, and a checksum that fits."""
    held, metadata = mx.load(str(path), format="safetensors", return_metadata=True)
    about = json.loads(metadata["row"])
    change(about)
    held = arrays(held) if arrays else held
    text = json.dumps(about)
    mx.save_safetensors(f"{path}.safetensors", held, {"row": text, "sha256": checksum(text, held)})
    return f"{path}.safetensors"


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("row", "id", 3),
        ("row", "id", "b"),
        ("row", "id", []),
        ("row", "choice", 1),
        ("row", "choice", "x"),
        ("row", "prompt", 0),
        ("row", "prompt", 1.5),
        ("row", "seed", None),
        ("row", "seed", 2**70),
        ("row", "tokens", []),
        ("row", "tokens", [300] * 40),
        ("row", "tokens", [[1]] * 40),
        ("row", "kept", -1),
        ("row", "kept", 10**6),
        ("row", "kept", 3),
        ("row", "drawn", False),
        ("drawn", "logprobs", ["x"] * 3),
        ("drawn", "margins", [0.5]),
        ("request", "allowed_tokens", [300]),
        ("request", "generated", [1]),
        ("request", "max_tokens", 10**6),
    ],
)
def test_a_row_that_no_engine_wrote_is_refused_before_it_can_stop_its_siblings(
    tiny, tmp_path, part, name, value
):
    begun(tiny, request(), 3).export_row("a", tmp_path / "row")
    path = altered(tmp_path / "row", lambda about: about[part].update({name: value}))
    assert refusal(tk.Engine(tiny), path).startswith("FILE: is not an exported row: ")
    whole = altered(tmp_path / "row", lambda about: None)
    assert same(_imported(tiny, whole), tk.generate(tiny, [request()])["a"])


@pytest.mark.parametrize(
    "arrays",
    [
        lambda held: {**held, "k1": held["k1"][:, :3]},
        lambda held: {**held, "v0": held["v0"].astype(mx.float16)},
        lambda held: {**held, "k0": mx.array(1.0)},
        lambda held: {**held, "k2": held["k1"], "v2": held["v1"]},
        lambda held: {name: a for name, a in held.items() if name != "k1"},
    ],
)
def test_keys_and_values_of_another_shape_are_refused(tiny, tmp_path, arrays):
    begun(tiny, request(), 3).export_row("a", tmp_path / "row")
    path = altered(tmp_path / "row", lambda about: None, arrays)
    assert "its keys and values aren't those of" in refusal(tk.Engine(tiny), path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_bit_that_flipped_anywhere_is_seen(tmp_path, dtype):
    model = tk.load("tiny", dtype=dtype)
    begun(model, request(), 3, invariant=False).export_row("a", tmp_path / "row")
    whole = (tmp_path / "row").read_bytes()
    made = tk.Engine(model, invariant=False)
    for place in np.linspace(8, len(whole) - 1, 60).astype(int):
        bad = bytearray(whole)
        bad[place] ^= 1
        (tmp_path / "bad").write_bytes(bad)
        assert refusal(made, tmp_path / "bad").startswith("FILE: "), place
    bad = bytearray(whole)
    bad[-2] ^= 1  # of a value, which looks like any other
    (tmp_path / "bad").write_bytes(bad)
    assert refusal(made, tmp_path / "bad").endswith("damaged, or changed, since it was written")
    made.import_row(tmp_path / "row")
    assert len(made.run()["a"].tokens) == request().max_tokens


def test_a_directory_or_a_device_is_no_place_for_a_row(tiny, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    made = begun(tiny, request(), 3)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match="a directory or a device: name a file"):
            made.export_row("a", path)
    assert (tmp_path / "pipe").is_fifo()
    assert same(made.run()["a"], tk.generate(tiny, [request()])["a"])


def test_what_names_no_file_is_one_line_and_the_row_stays(tiny, tmp_path):
    made = begun(tiny, request(), 3)
    for act in (lambda path: made.export_row("a", path), made.import_row):
        for path in (5, None, b"x", "", "x\0y", 1.5):
            with pytest.raises(ValueError, match=r"^path=.*: must name a file$"):
                act(path)
    with pytest.raises(ValueError, match=r"^.*/none/row: .*/none is no directory; make it first$"):
        made.export_row("a", tmp_path / "none" / "row")
    assert made.run()["a"].tokens == tk.generate(tiny, [request()])["a"].tokens
