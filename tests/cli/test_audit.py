"""`toolkit audit`: exit statuses, output and interrupts."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers.audit_servers import Batching, serve

from toolkit.cli import main, output

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cli(capfd):
    def run(*args):
        return main([str(arg) for arg in args]), *capfd.readouterr()

    return run


def test_the_command_exits_0_where_the_promise_is_kept_and_1_where_it_is_broken(cli, tmp_path):
    few = ("--model", "tiny", "--trials", 1, "--tokens", 6)
    status, out, err = cli("audit", "--policy", "keyed", *few)
    assert (status, err) == (0, "")
    assert out.endswith("The promise to seeded requests is kept.\n")
    table, picture = tmp_path / "pairs.csv", tmp_path / "picture.png"
    status, out, err = cli("audit", "--policy", "global", *few, "--out", table, "--chart", picture)
    assert (status, err) == (1, "")
    assert "Likely cause: last seed wins: " in out and max(map(len, out.splitlines())) <= 100
    assert table.read_text().startswith("check,trial,row,compared,first,text,other_text")
    assert picture.stat().st_size > 1000
    assert cli("audit", "--policy", "isolate", *few)[0] == 0
    assert cli("audit", "--policy", "isolate", *few, "--strict")[0] == 1


def test_its_json_is_sorted_and_has_the_documented_fields(cli):
    status, out, _ = cli("audit", "--policy", "reseed", "--model", "tiny", "--trials", 1, "--json")
    said = json.loads(out)
    assert status == 1 and out == json.dumps(said, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    fields = "checks complete diagnosis kind notes ok reading target tokens trials unit"
    assert set(said) == set(fields.split())
    fields = "name promise compares expects compared differing first verdict reason sentence"
    assert all(set(check) == set(fields.split()) for check in said["checks"])


def test_the_command_audits_a_server_with_own_prompts(cli, tiny, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once"}\n{"prompt": "Twice"}\n')
    server = Batching(tiny, "keyed")
    status, out, err = cli("audit", server.url, "--model", "tiny", "--prompts", prompts, "--trials", 1)
    assert (status, err) == (0, "") and server.url in out
    assert max(server.sizes) == 2


def test_bad_input_exits_2_and_an_unreachable_server_3_each_with_one_line(cli, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once", "temperature": 0}\n')
    for args, says, expected in [
        ((), "give either the URL of a server, or --policy", 2),
        (("http://127.0.0.1:1", "--policy", "keyed"), "give either the URL", 2),
        (("http://127.0.0.1:1",), "needs the name of the model", 2),
        (("nonsense", "--model", "x"), "must be a base URL", 2),
        (("--policy", "keyed", "--model", "tiny", "--trials", "0"), "trials=0", 2),
        (
            ("--policy", "keyed", "--model", "tiny", "--prompts", prompts),
            f"{prompts}:1: temperature=0: is greedy",
            2,
        ),
        (("http://127.0.0.1:1", "--model", "x"), "http://127.0.0.1:1/v1/completions: can't be reached", 3),
    ]:
        status, out, err = cli("audit", *args)
        assert (status, out, err.count("\n")) == (expected, "", 1), err
        assert says in err and err.startswith("toolkit: ")


def test_ctrl_c_prints_what_was_found_and_exits_130(tiny):
    answered = threading.Event()

    def answer(body):
        if answered.is_set():
            time.sleep(20)
        if body.get("seed") == 1001:  # of the second question
            answered.set()
        return 200, {"choices": [{"index": 0, "text": f"abc{body.get('seed')}"}]}

    args = [sys.executable, "-m", "toolkit", "audit", serve(answer=answer), "--model", "x"]
    process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert answered.wait(30)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "interrupted" in err and "repeat" in out and "(interrupted)" in out


def test_a_table_that_can_not_be_written_leaves_the_verdict_on_the_screen(cli, tmp_path, monkeypatch):
    def full(path, _):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(output, "write_table", full)
    status, out, err = cli("audit", "--policy", "keyed", "--model", "tiny", "--trials", 1, "--tokens", 2,
                           "--out", tmp_path / "x.csv")  # fmt: skip
    assert (status, err) == (1, f"toolkit: {tmp_path / 'x.csv'}: No space left on device\n")
    assert "The promise to seeded requests is kept." in out
