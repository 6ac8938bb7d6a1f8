"""The demo, as a newcomer meets it: a fresh process, on the tiny model and on the real one."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import toolkit as tk
from toolkit import cli
from toolkit.cli import demo

ROOT = Path(__file__).parents[2]
LEAK = "Every column is constant: B's seed decides A's first token, A's own seed does nothing."
CURE = "Every row is constant: A's own seed decides, B's seed does nothing."


def run(*args, cwd, **env):
    env = (
        {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
        | {"PYTHONPATH": str(ROOT)}
        | env
    )
    command = [sys.executable, "-m", "toolkit", "demo", *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)


def tables(text):
    """The cells of each matrix printed, row by row; tokens of these models' demo have no spaces inside."""
    found = []
    for part in re.split(r"^(?=global:|keyed:)", text, flags=re.MULTILINE)[1:]:
        rows = re.findall(r"^ *\d  (.*)$", part, re.MULTILINE)
        found.append([re.split(r"\s{2,}", row.strip()) for row in rows])
    return found


def test_the_real_model_shows_the_last_seed_win_and_the_end_of_it(tmp_path, smollm2):
    started = time.monotonic()
    done = run(cwd=tmp_path)
    took = time.monotonic() - started
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(LEAK) == done.stdout.count(CURE) == 1
    leak, cure = tables(done.stdout)
    assert [len(row) for row in leak + cure] == [8] * 16
    assert all(row == leak[0] for row in leak)
    assert len(set(leak[0])) > 4  # the sibling's seed does decide
    assert all(len(set(row)) == 1 for row in cure)
    assert len({row[0] for row in cure}) > 4  # my own does
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "\x1b" not in done.stdout
    assert (tmp_path / "seed_matrix.png").read_bytes().startswith(b"\x89PNG")
    assert "Next: " in done.stdout
    assert took < 20


def test_the_tiny_model_tells_the_same_story(tmp_path):
    done = run("--model", "tiny", "--out", "story.svg", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert LEAK in done.stdout
    assert CURE in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["story.svg"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    ("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colours_are_for_terminals_that_want_them(tmp_path, env, coloured):
    import pty

    master, slave = pty.openpty()
    environment = {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "COLUMNS": "100"} | env
    process = subprocess.Popen(
        [sys.executable, "-m", "toolkit", "matrix", "-", "--model", "tiny", "--seeds", "0:3"],
        env={k: v for k, v in os.environ.items() if k != "NO_COLOR"} | environment,
        stdin=subprocess.PIPE, stdout=slave, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(slave)
    process.stdin.write(b'{"prompt": "x"}\n{"prompt": "y"}\n')
    process.stdin.close()
    text = b""
    try:
        while part := os.read(master, 65536):
            text += part
    except OSError:  # Linux's way to say that the other end has gone
        pass
    os.close(master)
    assert process.wait(30) == 0
    assert (b"\x1b[48;5;" in text) == coloured
    plain = re.sub(r"\x1b\[[\d;]*m", "", text.decode()).replace("\r", "")
    assert max(map(len, plain.splitlines())) <= 100


def test_prompts_leave_the_model_unsure_enough_for_seeds_to_show(smollm2):
    requests = [tk.Request(prompt, id=id, seed=0) for id, prompt in demo.PROMPTS.items()]
    for id in demo.PROMPTS:
        assert tk.first_tokens(smollm2, requests, row=id, seeds=[0]).distribution["p"].max() <= 0.1


def test_a_directory_that_is_missing_is_told_before_a_model_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr("toolkit.models.load.load", None)
    assert cli.main(["demo", "--out", "nowhere/x.png"]) == 2
    assert "there is no directory nowhere" in capsys.readouterr().err
