"""The command as its user meets it: in a process of its own where signals, disks or pipes matter, on the tiny
model throughout. `cli` runs it here, `shell` in a fresh process."""

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import toolkit as tk
from toolkit.cli import main, parser

ROOT = Path(__file__).parents[2]
TWO = [
    {"id": "a", "prompt": "The children were playing with a", "seed": 7, "max_tokens": 6},
    {"id": "b", "prompt": "Yesterday I went to the", "seed": 3, "max_tokens": 4, "top_k": 20},
]
WHAT = "id choice tokens text finish_reason prompt_tokens cached logprobs margins max_drift"
HOW = "cohort cohort_kind cohort_index policy forward invariant stream seed"
FIELDS = {*WHAT.split(" "), *HOW.split(" ")}


def command(*args, **env):
    return {
        "args": [sys.executable, "-m", "toolkit", *map(str, args)],
        "env": {k: v for k, v in os.environ.items() if k != "TOOLKIT_BLAS"} | {"PYTHONPATH": str(ROOT)} | env,
    }


def shell(*args, stdin="", env=None, **how):
    """The command in a fresh process: exit status, output, and what it said on standard error."""
    how = command(*args, **(env or {})) | how
    done = subprocess.run(**how, input=stdin, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module", autouse=True)
def _measured(tiny):
    """The first run of a model on a machine measures its invariance and says so; here that has been done."""
    tk.doctor(tiny)


@pytest.fixture
def cli(capfd):
    def run(*args):
        status = main([str(arg) for arg in args])
        return status, *capfd.readouterr()

    return run


@pytest.fixture
def file(tmp_path):
    """Writes values as JSON lines and returns the file."""

    def write(*values, name="requests.jsonl"):
        path = tmp_path / name
        path.write_text("".join((v if isinstance(v, str) else json.dumps(v)) + "\n" for v in values))
        return path

    return write


def complaint(err):
    """The one line on standard error."""
    assert err.startswith("toolkit: ")
    assert err.count("\n") == 1, err
    return err.removeprefix("toolkit: ").rstrip("\n")


def leftovers(directory, *expected):
    return sorted(path.name for path in directory.iterdir() if path.name not in expected)


# generate


def test_generate_writes_one_line_a_choice_with_the_documented_fields_sorted(cli, file):
    status, out, err = cli("generate", file(TWO[0] | {"n": 2}, TWO[1]), "--model", "tiny")
    lines = [json.loads(line) for line in out.splitlines()]
    assert (status, err) == (0, "")
    assert [(line["id"], line["choice"]) for line in lines] == [("a", 0), ("a", 1), ("b", 0)]
    assert [len(line["tokens"]) for line in lines] == [6, 6, 4]
    assert lines[0]["tokens"] != lines[1]["tokens"]
    for line in lines:
        assert list(line) == sorted(line)
        assert set(line) >= FIELDS
        assert "top_logprobs" not in line


def test_output_floats_read_back_to_the_same_float32_bits(cli, file, tiny):
    _, out, _ = cli("generate", file(*TWO), "--model", "tiny")
    completions = tk.generate(tiny, [tk.Request(**fields) for fields in TWO])
    for text, completion in zip(out.splitlines(), completions, strict=True):
        line = json.loads(text)
        for name in ("logprobs", "margins"):
            read, made = (np.array(values, np.float32) for values in (line[name], getattr(completion, name)))
            assert len(made) == len(completion.tokens)
            np.testing.assert_array_equal(read.view(np.uint32), made.view(np.uint32))
            assert all(
                repr(v) == str(np.float32(v)) for v in line[name] if 1e-3 < abs(v) < 1e3
            )  # the shortest


def test_standard_input_gives_what_the_file_gives_byte_for_byte_in_any_process(cli, file):
    path = file(*TWO)
    _, out, _ = cli("generate", path, "--model", "tiny")
    assert shell("generate", "-", "--model", "tiny", stdin=path.read_text()) == (0, out, "")


def test_generate_obeys_policy_forward_and_planner(cli, file):
    path = file(*TWO)
    for options, policy, forward, kind in [
        ((), "keyed", "packed", "packed"),
        (("--policy", "global", "--forward", "padded"), "global", "padded", "batched"),
        (("--forward", "padded", "--planner", "by-length"), "keyed", "padded", "batched"),
        (("--forward", "sequential", "--no-invariant"), "keyed", "sequential", "sequential"),
    ]:
        status, out, err = cli("generate", path, "--model", "tiny", *options)
        assert (status, err) == (0, "")
        line = json.loads(out.splitlines()[0])
        assert (line["policy"], line["forward"], line["cohort_kind"]) == (policy, forward, kind)


def test_a_table_of_tokens_goes_to_csv_and_parquet(cli, file, tmp_path):
    path = file(*TWO)
    for name in ("t.csv", "t.parquet"):
        assert cli("generate", path, "--model", "tiny", "--out", tmp_path / name) == (0, "", "")
    csv, parquet = pd.read_csv(tmp_path / "t.csv"), pd.read_parquet(tmp_path / "t.parquet")
    assert list(csv["token"]) == list(parquet["token"])
    assert len(csv) == 10
    np.testing.assert_array_equal(csv["logprob"].to_numpy(), parquet["logprob"].to_numpy())


# Bad input


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"prompt": "x", "seed": 2**63}, "seed=9223372036854775808"),
        ({"prompt": "x", "seed": 1.5}, "seed=1.5"),
        ({"prompt": "x", "seed": "7"}, 'seed="7"'),
        ({"prompt": "x", "seed": True}, "seed=True"),
        ({"prompt": "x", "top_p": 0}, "top_p=0"),
        ({"prompt": "x", "temperature": -1}, "temperature=-1"),
        ({"prompt": "x", "temprature": 1}, "did you mean temperature?"),
        ({"prompt": "x", "tokens": [1]}, "exactly one of"),
        ({"prompt": "x", "id": "a"}, "already the id"),
        ({}, "exactly one of"),
        ("[1, 2]", "must be an object"),
        ("{nonsense}", "not JSON"),
        ('{"prompt": "x", "seed": NaN}', "seed=nan"),
    ],
)
def test_a_bad_line_is_named_with_file_line_field_and_value_before_anything_runs(cli, file, line, says):
    path = file(TWO[0], "", line)
    out = path.with_name("old.jsonl")
    out.write_text("old")
    status, printed, err = cli("generate", path, "--model", "tiny", "--out", out)
    assert (status, printed, out.read_text()) == (2, "", "old")
    assert complaint(err).startswith(f"{path}:3: ")
    assert says in err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"prompt": ""}, "has no tokens"),
        ({"tokens": []}, "has no tokens"),
        ({"tokens": [1, 99_999]}, "tokens[1]=99999"),
        ({"tokens": [1] * 9_000}, "context"),
        ({"prompt": "x", "max_tokens": 9_000}, "max_tokens=9000"),
        ({"prompt": "x", "allowed_tokens": []}, "allowed_tokens=[]"),
        ({"prompt": "x", "allowed_tokens": [70_000]}, "vocabulary"),
        ({"prompt": "x", "messages": None, "cached": 1}, "cached=1"),
    ],
)
def test_what_the_model_cannot_take_is_one_line_and_its_siblings_finish(cli, file, line, says):
    path = file(TWO[0], line | {"id": "bad", "seed": 1}, TWO[1])
    status, out, err = cli("generate", path, "--model", "tiny")
    lines = [json.loads(text) for text in out.splitlines()]
    assert status == 2
    assert says in complaint(err)
    assert err.startswith(f"toolkit: {path}:2: ")
    assert (lines[1]["id"], lines[1]["finish_reason"], lines[1]["tokens"]) == ("bad", "error", [])
    assert lines[1]["error"] in err
    _, alone, _ = cli("generate", file(*TWO, name="alone.jsonl"), "--model", "tiny")
    for sibling, text in zip((lines[0], lines[2]), alone.splitlines(), strict=True):
        expected = json.loads(text)
        for name in ("tokens", "logprobs", "text", "finish_reason"):
            assert sibling[name] == expected[name]


def test_seeds_of_every_size_and_sign_are_streams_of_their_own(cli, file):
    seeds = [42, 1715852364, 2**32 + 42, -1, 2**63 - 1]
    lines = [{"prompt": "x", "seed": seed, "max_tokens": 12} for seed in seeds]
    status, out, _ = cli("generate", file(*lines), "--model", "tiny")
    made = [json.loads(text) for text in out.splitlines()]
    assert status == 0
    assert [line["seed"] for line in made] == seeds
    assert len({tuple(line["tokens"]) for line in made}) == len(seeds)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "COMMAND"),
        (("generate",), "FILE"),
        (("dance",), "dance"),
        (("generate", "x", "--policy", "fair"), "fair"),
        (("generate", "x", "--max-rows", "many"), "many"),
        (("generate", "no-such-file.jsonl"), '"no-such-file.jsonl": No such file'),
        (("generate", "{file}", "--max-rows", "0"), "max_rows=0"),
        (("generate", "{file}", "--token-budget", "-1"), "token_budget=-1"),
        (("generate", "{file}", "--model", "no/such/model"), "no/such/model"),
        (("generate", "{file}", "--forward", "padded", "--planner", "packed"), "planner"),
        (("generate", "{file}", "--forward", "padded", "--invariant"), "invariant=True"),
        (("generate", "{file}", "--out", "nowhere/x.jsonl"), "there is no directory nowhere"),
        (("generate", "{file}", "--out", "."), "is a directory"),
        (("matrix", "{file}", "--out", "x.txt"), ".parquet, .csv or .jsonl"),
        (("matrix", "{file}", "--row", "z"), '--row "z"'),
        (("matrix", "{file}", "--row", "a", "--sibling", "a"), 'sibling="a"'),
        (("matrix", "{file}", "--seeds", "1:2:3:4"), "1:2:3:4"),
        (("matrix", "{file}", "--seeds", "5:5"), "from 1 to"),
        (("matrix", "{file}", "--seeds", f"0:{2**80}"), "seeds"),
        (("seeds", "{file}", "--seeds", str(2**63)), "[-2^63, 2^63)"),
        (("seeds", "{file}", "--policy", "keyed,fair"), "fair"),
        (("plan", "{file}", "--model", "tiny", "--planner", "best"), "best"),
        (("demo", "--out", "nowhere/x.png"), "there is no directory nowhere"),
        (("demo", "--out", "x.gif"), ".png, .svg or .html"),
    ],
)
def test_a_bad_argument_is_one_line_and_exit_2(cli, file, args, says, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    args = [file(*TWO) if arg == "{file}" else arg for arg in args]
    if args and args[0] in ("generate", "matrix", "seeds") and "--model" not in args:
        args += ["--model", "tiny"]
    status, out, err = cli(*args)
    assert (status, out) == (2, "")
    assert says in complaint(err)
    assert leftovers(tmp_path, "requests.jsonl") == []


def test_an_empty_file_is_bad_input(cli, file):
    for name in ("generate", "plan", "matrix"):
        status, out, err = cli(name, file(), "--model", "tiny")
        assert (status, out) == (2, "")
        assert "no r" in complaint(err)


def test_a_bad_blas_is_one_line_and_exit_2(file):
    status, out, err = shell("plan", file({"length": 3}), env={"TOOLKIT_BLAS": "no-such-library.so"})
    if sys.platform == "linux":
        assert (status, out) == (2, "")
        assert complaint(err).startswith("TOOLKIT_BLAS=no-such-library.so: no such file")
    assert shell("plan", file({"length": 3}), env={"TOOLKIT_BLAS": "off"})[0] == 0


# Files that are whole or not there

LONG = {"prompt": "x", "seed": 1, "max_tokens": 8_000}


def running(tmp_path, *args):
    """The command, once it has begun to generate."""
    mark = tmp_path / "began"
    # A mark when the engine starts: waiting for a fixed time would be slow, or flaky.
    code = f"""
import sys, pathlib, toolkit.engine.engine as e
run = e.Engine.run
def marked(*args, **how):
    pathlib.Path({str(mark)!r}).touch()
    return run(*args, **how)
e.Engine.run = marked
from toolkit.cli import main
sys.exit(main(sys.argv[1:]))
"""
    how = command(*args)
    how["args"] = [sys.executable, "-c", code, *map(str, args)]
    process = subprocess.Popen(**how, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not mark.exists() and time.monotonic() < until and process.poll() is None:
        time.sleep(0.02)
    mark.unlink()
    return process


@pytest.mark.parametrize(
    ("blow", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9), (signal.SIGTERM, -15)]
)
def test_a_run_that_is_stopped_leaves_the_old_output_and_nothing_else(file, tmp_path, blow, status):
    path = file(LONG)
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    process = running(tmp_path, "generate", path, "--model", "tiny", "--out", out)
    process.send_signal(blow)
    printed, err = process.communicate(timeout=30)
    assert (process.returncode, printed, out.read_text()) == (status, "", "old")
    assert leftovers(tmp_path, "out.jsonl", "requests.jsonl", "began") == []
    if blow == signal.SIGINT:
        assert complaint(err) == "interrupted; nothing was written"


def test_an_interrupt_behind_another_error_is_an_interrupt(monkeypatch, file, capsys):
    from toolkit.engine import engine

    def struck(*_, **__):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise RuntimeError("half way") from None

    monkeypatch.setattr(engine, "generate", struck)
    assert main(["generate", str(file(LONG)), "--model", "tiny"]) == 130
    assert capsys.readouterr().err == "toolkit: interrupted; nothing was written\n"
    monkeypatch.setattr(engine, "generate", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["generate", str(file(LONG)), "--model", "tiny"])


def test_a_process_killed_while_it_writes_leaves_the_old_output(file, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    code = """
import os, signal, sys
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
from toolkit.cli import main
main(sys.argv[1:])
"""
    args = ["generate", file(*TWO), "--model", "tiny", "--out", out]
    done = shell(*args, args=[sys.executable, "-c", code, *map(str, args)])
    assert done == (-9, "", "")
    assert out.read_text() == "old"
    assert cli_ok(args)  # and the next run isn't bothered by what that one left
    assert len(out.read_text().splitlines()) == 2


def cli_ok(args):
    return main([str(arg) for arg in args]) == 0


def test_a_full_disk_is_one_line_and_leaves_the_old_output(file, tmp_path):
    """A limit on file size fails in the same place as a full disk: in the middle of the writing."""
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    code = """
import resource, sys
from toolkit.cli import main, output
write = output.write
def limited(*args):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    write(*args)
output.write = limited
sys.exit(main(sys.argv[1:]))
"""
    args = ["generate", file(TWO[0] | {"n": 4}), "--model", "tiny", "--out", out]
    status, printed, err = shell(*args, args=[sys.executable, "-c", code, *map(str, args)])
    assert (status, printed, out.read_text()) == (1, "", "old")
    assert complaint(err) == f"{out}: File too large"
    assert leftovers(tmp_path, "out.jsonl", "requests.jsonl", "began") == []
    assert cli_ok(args)  # without the limit
    assert len(out.read_bytes()) > 1000


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_full_standard_output_is_one_line(file, tmp_path):
    path = file({"length": 3})
    with open("/dev/full", "w") as full:
        how = command("plan", path) | {"stdout": full, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(**how, timeout=60, check=False)
    assert done.returncode == 1
    assert complaint(done.stderr) == "No space left on device"
    link = tmp_path / "full.jsonl"
    link.symlink_to("/dev/full")  # a device is written to, never replaced
    status, _, err = shell("plan", path, "--out", link)
    assert (status, "No space left" in complaint(err)) == (1, True)
    assert Path("/dev/full").is_char_device()


def test_a_link_and_permissions_stay_as_they_were(cli, file, tmp_path):
    (tmp_path / "data").mkdir()
    target, link = tmp_path / "data" / "real.jsonl", tmp_path / "link.jsonl"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    assert cli("plan", file({"length": 3}), "--out", link) == (0, "", "")
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert json.loads(target.read_text().splitlines()[0])["length"] == 3


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_who_has_seen_enough_is_no_error(file, unbuffered):
    path = file({"prompt": "x", "seed": 1, "n": 250, "max_tokens": 1})  # more output than a pipe holds
    args = ["generate", path, "--model", "tiny", "--max-rows", "250"]
    how = command(*args, PYTHONUNBUFFERED=unbuffered) | {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(**how) as process:
        first = process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
    assert (process.wait(), err) == (141, b"")
    assert json.loads(first)["choice"] == 0
    if unbuffered:  # one who reads to the end gets it all, though each write may take a part of it
        with subprocess.Popen(**how) as process:
            assert len(process.stdout.readlines()) == 250


# plan

LENGTHS = [374, 12, 12, 900, 33, 33, 7, 374]


def test_plan_gives_the_same_totals_for_lengths_a_csv_and_requests(cli, file):
    csv = "\n".join(["# a trace", "TIMESTAMP,ContextTokens,GeneratedTokens", *(f"t,{n},1" for n in LENGTHS)])
    ways = {
        "lengths.jsonl": [{"length": n} for n in LENGTHS],
        "trace.csv": [csv],
        "tokens.jsonl": [{"tokens": [1] * n} for n in LENGTHS],
        "text.jsonl": [{"prompt": "x" * n} for n in LENGTHS],
    }
    made = [cli("plan", file(*lines, name=name), "--model", "tiny", "--json") for name, lines in ways.items()]
    assert all(done == made[0] for done in made)
    status, out, err = made[0]
    assert (status, err) == (0, "")
    plan = json.loads(out)
    assert json.dumps(plan, sort_keys=True, indent=2) + "\n" == out
    assert (plan["rows"], plan["max_rows"], plan["token_budget"]) == (8, 32, 4096)
    by = {s["strategy"]: s for s in plan["strategies"]}
    assert by["packed"]["padded_tokens"] == sum(LENGTHS) == by["packed"]["tokens"]
    assert by["runs"]["padded_tokens"] == 4 * 900 + 4 * 374  # 5 x 900 would break the budget
    assert sum(LENGTHS) <= by["by-length"]["padded_tokens"] < by["runs"]["padded_tokens"]


def test_plan_obeys_planner_caps_and_priority(cli, file):
    path = file(*({"length": n} for n in LENGTHS))
    _, out, _ = cli("plan", path, "--planner", "runs", "--max-rows", "2", "--token-budget", "0", "--json")
    (runs,) = json.loads(out)["strategies"]
    assert (runs["cohorts"], runs["padded_tokens"]) == (4, 2 * (374 + 900 + 33 + 374))
    _, out, _ = cli("plan", path, "--planner", "runs", "--max-rows", "2", "--token-budget", "0")
    assert "8 rows, at most 2 rows in a cohort" in out
    assert "3,362" in out


def test_plan_writes_every_rows_cohort_in_three_formats(cli, file, tmp_path):
    path = file(*({"length": n, "cached": n // 5} for n in LENGTHS))
    frames = []
    for name, read in [("p.csv", pd.read_csv), ("p.parquet", pd.read_parquet), ("p.jsonl", None)]:
        out = tmp_path / name
        assert cli("plan", path, "--out", out) == (0, "", "")
        frames.append(read(out) if read else pd.read_json(out, lines=True))
    assert len(frames[0]) == 3 * len(LENGTHS)
    for frame in frames[1:]:
        pd.testing.assert_frame_equal(frames[0], frame[frames[0].columns], check_dtype=False)


def test_help_and_plan_load_no_model_code(file):
    code = """
import sys
from toolkit.cli import main
main(sys.argv[1:])
print(*sys.modules, file=sys.stderr)
"""
    for args in (["--help"], ["generate", "--help"], ["plan", file({"length": 3})]):
        status, out, err = shell(*args, args=[sys.executable, "-c", code, *map(str, args)])
        assert status == 0
        assert out
        loaded = set(err.split())
        assert "toolkit.cli.parser" in loaded  # the list can tell
        assert not {"mlx_lm", "mlx.nn", "transformers", "pandas", "altair", "toolkit.engine.engine"} & loaded
        assert ("mlx.core" in loaded) == (args[0] == "plan")


# seeds, matrix


def test_matrix_shows_the_leak_and_its_end_and_writes_the_same_table_in_three_formats(cli, file, tmp_path):
    path = file(*TWO)
    common = ["matrix", path, "--model", "tiny", "--seeds", "0:4", "--sibling-seeds", "10,20,30"]
    status, out, err = cli(*common)
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    assert "Every column is constant: b's seed decides a's first token" in out
    assert "Every row is constant: a's own seed decides" in out
    frames = []
    for name, read in [("m.csv", pd.read_csv), ("m.parquet", pd.read_parquet), ("m.jsonl", None)]:
        assert cli(*common, "--out", tmp_path / name) == (0, "", "")
        # pandas would turn the text of a digit into a number
        frame = read(tmp_path / name) if read else pd.read_json(tmp_path / name, lines=True, dtype=False)
        frames.append(frame.astype({"text": str}))
    table = frames[1]
    assert list(table.columns) == ["policy", "row", "sibling", "seed", "sibling_seed", "token", "text"]
    assert len(table) == 2 * 4 * 3
    for frame in frames:
        assert list(frame["token"]) == list(table["token"])
        assert list(frame["sibling_seed"]) == list(table["sibling_seed"])
    _, out, _ = cli(*common, "--json")
    assert out == (tmp_path / "m.jsonl").read_text()


def test_a_wide_matrix_fits_100_columns_and_says_what_it_left_out(cli, file):
    _, out, _ = cli("matrix", file(*TWO), "--model", "tiny", "--seeds", "0:2", "--sibling-seeds", "0:60")
    assert max(map(len, out.splitlines())) <= 100
    assert "more columns; --out writes them all" in out


def test_seeds_counts_what_was_drawn_beside_what_was_expected(cli, file, tmp_path, tiny):
    path, out = file(*TWO), tmp_path / "s.jsonl"
    status, text, err = cli("seeds", path, "--model", "tiny", "--row", "b", "--seeds", "0:50")
    assert (status, err) == (0, "")
    assert text.startswith("keyed: first token of b for 50 seeds, ")
    assert cli("seeds", path, "--model", "tiny", "--row", "b", "--seeds", "0:50", "--out", out) == (0, "", "")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["seed"] for line in lines] == list(range(50))
    requests = [tk.Request(**fields) for fields in TWO]
    made = tk.first_tokens(tiny, requests, row="b", seeds=range(50)).to_frame()
    assert [line["token"] for line in lines] == list(made["token"])
    np.testing.assert_array_equal(
        np.array([line["logprob"] for line in lines], np.float32), made["logprob"].to_numpy(np.float32)
    )


def test_seeds_and_matrix_draw_pictures(cli, file, tmp_path):
    for name, option in (("seeds", "--seeds=0:20"), ("matrix", "--seeds=0:3")):
        picture = tmp_path / f"{name}.svg"
        args = [name, file(*TWO), "--model", "tiny", option, "--policy", "global,keyed", "--chart", picture]
        assert cli(*args) == (0, "", "")
        assert picture.read_text().startswith("<svg")


def test_drift_is_zero_where_it_is_promised_and_is_written_as_a_table_and_a_picture(cli, file, tmp_path):
    table, picture = tmp_path / "d.parquet", tmp_path / "d.svg"
    common = ["drift", file(*TWO), "--model", "tiny", "--seeds", "0:5"]
    assert cli(*common, "--out", table, "--chart", picture) == (0, "", "")
    frame = pd.read_parquet(table)
    assert picture.read_text().startswith("<svg")
    assert (frame.loc[frame["invariant"], "max_abs"] == 0).all() and frame["invariant"].any()
    status, out, err = cli(*common)
    assert (status, err) == (0, "") and "runs have the alone run's bits" in out
    status, out, err = cli(*common, "--row", "zz")
    assert status == 2 and err == 'toolkit: --row "zz": must be one of a, b\n'


@pytest.mark.parametrize("command", ["seeds", "matrix", "drift"])
def test_what_the_model_cannot_take_is_told_by_file_and_line(cli, file, command):
    status, out, err = cli(command, file(*TWO, {"tokens": []}), "--model", "tiny")
    assert (status, out) == (2, "")
    assert 'requests.jsonl:3: tokens=() for request "r2": has no tokens' in complaint(err)


@pytest.mark.parametrize("command", ["seeds", "matrix", "drift"])
def test_a_row_that_is_not_there_is_refused_before_a_model_is_loaded(cli, file, command):
    asked = [("--row", "zz")] + [("--sibling", "zz")] * (command == "matrix")
    for option, id in asked:
        status, out, err = cli(command, file(*TWO), "--model", "no such model", option, id)
        assert (status, out, err) == (2, "", f'toolkit: {option} "zz": must be one of a, b\n')


# doctor, fetch, and the rest


def test_doctor_says_what_computes_here(cli):
    status, out, err = cli("doctor", "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert json.dumps(found, sort_keys=True, indent=2, ensure_ascii=False) + "\n" == out
    assert (found["model"], found["invariance"]) == (None, None)
    assert found["backend"]["mlx"] == tk.backend.info().mlx
    _, text, _ = cli("doctor")
    assert found["backend"]["device_name"] in text


def test_doctor_exits_1_where_invariance_cannot_be_promised(cli, tiny, monkeypatch):
    holds = tk.doctor(tiny)
    status, out, err = cli("doctor", "--model", "tiny", "--json")
    found = json.loads(out)["invariance"]
    assert (status, err) == (0 if holds.promised else 1, "")
    assert found["holds"] is holds.promised
    assert len(found["checks"]) == len(holds.to_frame()) > 3
    _, text, _ = cli("doctor", "--model", "tiny")
    assert holds.reason in text
    assert all(check.what in text for check in holds.verdict.checks)

    from toolkit.forward.shapes import PLAIN
    from toolkit.invariance import verdict

    check = verdict.Check("linear 64 x 128", "tile 1", 12, 5, 1e-6)
    failed = verdict.Verdict(PLAIN, False, (check,), {})
    monkeypatch.setattr("toolkit.study.doctor.verdict", lambda *_, **__: failed)
    status, text, _ = cli("doctor", "--model", "tiny")
    assert status == 1
    assert "tiny is not batch-invariant here: 1 of 1 checks failed" in text


def test_doctor_of_a_model_that_cannot_run_packed_says_why(cli, monkeypatch):
    mamba = tk.tiny(model_type="mamba")
    monkeypatch.setattr("toolkit.models.load.load", lambda *_, **__: mamba)
    status, text, _ = cli("doctor", "--model", "tiny")
    assert status == 1
    assert "can't run packed: " in text
    assert json.loads(cli("doctor", "--model", "tiny", "--json")[1])["invariance"]["checks"] == []


def test_fetch_of_a_model_that_needs_none_says_ready(cli):
    assert cli("fetch", "tiny") == (0, "tiny: ready\n", "")


def test_the_parsers_copies_of_the_engines_values_are_right():
    from toolkit.engine import engine, policies
    from toolkit.invariance import build

    defaults = inspect.signature(engine.Engine).parameters
    assert defaults["max_rows"].default == parser.MAX_ROWS
    assert defaults["token_budget"].default == parser.TOKEN_BUDGET
    assert policies.POLICIES == parser.POLICIES
    assert build.FORWARDS == parser.FORWARDS


def test_an_error_can_be_traced(file, monkeypatch):
    monkeypatch.setenv("TOOLKIT_TRACEBACK", "1")
    with pytest.raises(ValueError, match="seed=True"):
        main(["generate", str(file({"prompt": "x", "seed": True})), "--model", "tiny"])


@pytest.mark.parametrize(
    "args",
    [("generate", "FILE", "--model", "tiny"), ("plan", "FILE"), ("seeds", "FILE", "--model", "tiny"),
     ("sweep", "FILE", "--model", "tiny", "--study", "first-tokens", "--grid", "temperature=1"),
     ("audit", "--policy", "keyed", "--model", "tiny", "--prompts", "FILE")],
    ids=lambda args: args[0],
)  # fmt: skip
def test_the_input_is_never_written_over(cli, file, tmp_path, args):
    path = file(*TWO)
    before = Path(path).read_bytes()
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    for out in (path, link):
        status, said, told = cli(*(path if a == "FILE" else a for a in args), "--out", out)
        assert (status, said) == (2, "")
        assert told == f"toolkit: --out {out}: is the input, which would be gone; name another file\n"
    assert Path(path).read_bytes() == before


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_terminal_that_cannot_show_a_character_gets_its_escape(file, encoding):
    path = file({"prompt": "a", "id": "\N{SNOWMAN}", "seed": 1, "max_tokens": 2})
    env = {"PYTHONIOENCODING": encoding}
    status, printed, err = shell("seeds", path, "--model", "tiny", "--seeds", "0:3", env=env)
    assert (status, err) == (0, "")
    assert "\\u2603" in printed
    status, printed, _ = shell(
        "seeds", path, "--model", "tiny", "--seeds", "0:3", env={"PYTHONIOENCODING": "utf-8"}
    )
    assert "\N{SNOWMAN}" in printed and "\\u2603" not in printed
