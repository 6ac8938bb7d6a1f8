"""Model directories: none of their code runs, and each broken one is refused in one line."""

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import toolkit as tk
from toolkit import backend

ROOT = Path(__file__).parents[2]


@pytest.fixture
def directory(tiny, tmp_path):
    """The tiny model as a directory; a test may spoil it."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(tiny.config))
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(tiny.module.parameters())))
    tiny.tokenizer._tokenizer.save_pretrained(str(path))
    return path


def change(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def refused(path):
    with pytest.raises(ValueError) as caught:
        tk.load(path, progress=False)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 700
    return line


def loaded_in_a_process(path, answers="y\n" * 9):
    """Exit status, output and errors of loading a directory where somebody would answer any question."""
    load = "tk.load(sys.argv[1], progress=False)"
    code = f"import sys, toolkit as tk\ntry: {load}\nexcept ValueError as e: sys.exit(str(e))"
    run = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(run, cwd=ROOT, input=answers, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("what", ["tokenizer", "config", "both", "model_file"])
def test_code_of_a_model_is_never_run_and_nothing_is_asked(directory, what):
    mark = directory / "ran"
    code = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"
    for name in ("code.py", "tokenization_code.py"):
        (directory / name).write_text(code + "class Tok: pass\nclass Conf: pass\nclass Model: pass\n")
    if what in ("tokenizer", "both"):
        names = ["tokenization_code.Tok", "tokenization_code.Tok"]
        change(directory / "tokenizer_config.json", auto_map={"AutoTokenizer": names}, tokenizer_class="Tok")
    if what in ("config", "both"):
        change(directory / "config.json", auto_map={"AutoConfig": "code.Conf"}, model_type="llama")
    if what == "model_file":
        change(directory / "config.json", model_file="code.py")
    status, out, err = loaded_in_a_process(directory)
    assert out == "" and not mark.exists()
    assert "Traceback" not in err
    if status:
        assert err.count("\n") == 1
    # The control: the file does leave its mark where it is run.
    subprocess.run([sys.executable, str(directory / "code.py")], check=True)
    assert mark.exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("name", ["model_type", "chat_template_type", "tool_parser_type"])
def test_a_name_that_would_be_imported_must_be_one_name(directory, file, name):
    for value in ("..os", "a/b", "", 7, ["llama"]):
        change(directory / file, **{name: value})
        assert f"{name}=" in refused(directory)


def test_a_directory_whose_name_is_a_pattern_loads(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "m[1]*")
    model = tk.load(tmp_path / "m[1]*", progress=False)
    assert model.vocab_size == tk.load(directory, progress=False).vocab_size


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be an integer from 1 to "),
        ({"num_hidden_layers": "2"}, 'num_hidden_layers="2": must be an integer'),
        ({"hidden_size": -1}, "hidden_size=-1: must be an integer"),
        ({"vocab_size": 1e3}, "vocab_size=1000.0: must be an integer"),
        ({"head_dim": True}, "head_dim=True: must be an integer"),
        ({"num_attention_heads": {}}, "num_attention_heads={}: must be an integer"),
        ({"text_config": "x"}, 'text_config="x": must be an object'),
        ({"model_type": "olmo"}, "can't be loaded"),
        ({"rope_theta": "x"}, "its configuration doesn't fit its layers"),
        ({"quantization": 5}, "can't be loaded"),
    ],
)
def test_a_configuration_of_wrong_values_is_refused_in_one_line(directory, fields, says):
    change(directory / "config.json", **fields)
    assert says in refused(directory)


def test_files_that_are_not_what_their_names_say_are_refused_in_one_line(directory):
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    for data, says in [
        (b"", "is no safetensors file"),
        (b"\0" * 8, "is no safetensors file"),
        (struct.pack("<Q", 2**60) + whole[8:], "is no safetensors file"),
        (whole[:8] + b"x" * (len(whole) - 8), "its header can't be read"),
        (struct.pack("<Q", 2) + b"[]" + whole, "its header can't be read"),
    ]:
        weights.write_bytes(data)
        assert says in refused(directory)
    weights.write_bytes(whole)
    for data, says in [("[]", "must hold a JSON object"), ("{", "is no JSON"), ("[" * 100_000, "is no JSON")]:
        (directory / "config.json").write_text(data)
        assert says in refused(directory)


def test_where_few_files_may_be_open_models_still_load(directory):
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024)); "
        "import toolkit as tk; tk.load(sys.argv[1], progress=False); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    run = [sys.executable, "-c", code, str(directory)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "(1024, 1024)\n"), done.stderr


def test_a_cache_of_nobody_is_one_line(monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", "~nobody-of-that-name/x")
    with pytest.raises(ValueError, match=r"^TOOLKIT_CACHE='~nobody-of-that-name/x': there is no such user"):
        backend.cache_dir()
