"""The benchmark's shape, on the tiny model: what it runs, prints and promises. Never how fast it is."""

import json
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

import toolkit as tk
from toolkit.bench import bits, measure, ours, peers, report, rows, suite, workloads
from toolkit.bench.measure import Check, Clock, Figure, Skipped
from toolkit.cli import main

SMALL = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 128, "vocab_size": 500,
}  # fmt: skip


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "lengths.csv"
    path.write_text("ContextTokens\n" + "\n".join(str(80 + 40 * i) for i in range(12)) + "\n")
    return path


@pytest.fixture(scope="module")
def small():
    return workloads.random_qwen3(dtype=mx.float32, **SMALL)


def job(model, **changes):
    plain = {"gpu": False, "quick": True, "rounds": 1, "budget": 4096, "checked": 4, "trace": None}
    return rows.Job(model=workloads.endless(model), clock=Clock(), **(plain | changes))


def test_the_command_writes_a_table_as_it_goes_and_a_document_with_stable_keys(lengths, capfd):
    asked = ["bench", "--model", "tiny", "--quick", "--json", "--trace", str(lengths)]
    assert main([*asked, "--only", "prefill,decode,rules,trace,draw,installed,bits"]) == 0
    out, err = capfd.readouterr()
    made = json.loads(out)
    assert list(made) == sorted(made)
    assert set(made) == {"backend", "model", "quick", "rounds", "rows", "seconds"}
    kinds = {"speed": Figure, "bits": Check, "skipped": Skipped}
    fields = {k: {*kind.__dataclass_fields__, "kind", "met"} for k, kind in kinds.items()}
    fields["speed"] |= {"ratio", "ours_rate", "peer_rate"}
    fields["speed"] -= {"speedup"}
    fields["skipped"] -= {"met"}
    for row in made["rows"]:
        assert set(row) == fields[row["kind"]]
    names = [row["name"] for row in made["rows"]]
    assert list(dict.fromkeys(names)) == ["prefill", "decode", "rules", "trace", "draw", "installed", "bits"]
    for row in made["rows"]:
        assert row["kind"] != "speed" or row["ratio"] == pytest.approx(row["peer"] / row["ours"])
        if row["name"] != "draw" and row.get("met") is False:
            assert sum(row["where"].values()) == pytest.approx(1)
    assert "at least" in err and "BatchGenerator" in err


def test_what_is_asked_for_wrongly_is_one_line(capfd):
    for wrong in (["--only", "speed"], ["--rounds", "0"], ["--limit", "-1"], ["--trace", "nowhere.csv"]):
        assert main(["bench", "--model", "tiny", *wrong]) == 2
        assert capfd.readouterr().err.count("\n") == 1


def test_the_prompts_are_as_many_tokens_as_the_tables_say():
    assert sum(workloads.lengths(*workloads.SHORT)) == 1847
    assert sum(workloads.lengths(*workloads.MIXED)) == 33_885


def test_sides_take_turns_and_the_first_turn_only_warms():
    seen, times = [], iter([9.0, 9.0, 1.0, 2.0, 3.0, 6.0, 2.0, 4.0])

    def side(name):
        def run():
            seen.append(name)
            return next(times)

        return run

    assert measure.medians({"a": side("a"), "b": side("b")}, 3) == {"a": 2.0, "b": 4.0}
    assert seen == ["a", "b"] * 4


def test_both_sides_are_timed_over_all_their_tokens(tiny):
    model = workloads.endless(tiny)
    engine = tk.Engine(model, max_rows=64)
    batch = ours.requests(workloads.prompts([9, 4, 17], model.vocab_size), 5)
    prompts = [list(r.tokens) for r in batch]
    assert all(t > 0 for t in (ours.whole(engine, batch), ours.decode(engine, batch)))
    assert all(t > 0 for t in (peers.first_tokens(model, prompts), peers.decode(model, prompts, 5)))
    assert engine.idle
    shares = ours.profile(engine, batch, decoding=True)
    assert set(shares) == {"build", "forward", "draw", "rest"}
    assert sum(shares.values()) == pytest.approx(1)
    assert "run" not in vars(engine.forward)  # as it was


def test_the_random_model_needs_no_tokenizer_and_leaves_the_generator_alone(small):
    mx.random.seed(3)
    before = np.array(mx.random.state[0])
    again = workloads.random_qwen3(dtype=mx.float32, **SMALL)
    assert (np.array(mx.random.state[0]) == before).all()
    ids = mx.array([[1, 2, 3]])
    assert (np.array(small.module(ids)) == np.array(again.module(ids))).all()
    (done,) = tk.generate(small, [tk.Request("5 6 7", seed=1, max_tokens=3)])
    assert done.text == " ".join(map(str, done.tokens))


def test_the_gpu_groups_run_wherever_they_are(small, monkeypatch):
    plain = workloads.random_qwen3
    monkeypatch.setattr(workloads, "random_qwen3", lambda n=0: plain(n, dtype=mx.float32, **SMALL))
    monkeypatch.setattr(workloads, "MIXED", workloads.SHORT)
    asked = job(small, gpu=True, checked=2)
    for name in ("prefill", "decode", "bits-4bit"):
        lines = list(suite._lines(name, asked))
        assert not any(isinstance(line, Skipped) for line in lines), lines
        assert all(report.text(line) for line in lines)


def test_bits_that_differ_are_told_and_make_the_command_fail(tiny, monkeypatch, capfd):
    """The control: the check must see a single different bit."""
    whole = bits.ways

    def tampered(batch, engine):
        made = whole(batch, engine)

        def other():
            out = made["permuted"]()
            tokens, logprobs = out["q0"]
            changed = bytes([logprobs[0] ^ 1]) + logprobs[1:]
            return out | {"q0": (tokens, changed)}

        return made | {"permuted": other}

    monkeypatch.setattr(bits, "ways", tampered)
    assert main(["bench", "--model", "tiny", "--quick", "--only", "bits"]) == 1
    line = next(n for n in capfd.readouterr().out.splitlines() if "permuted" in n)
    assert line.endswith("NO")


def test_what_fails_or_comes_too_late_is_a_line_and_the_rest_runs(tiny, monkeypatch):
    def broken(job):
        raise RuntimeError("no such kernel\nat all")
        yield

    monkeypatch.setitem(suite.RUN, "draw", broken)
    (line,) = suite._lines("draw", job(tiny))
    assert line == Skipped("draw", "RuntimeError: no such kernel at all", failed=True)
    late = rows.Job(**(job(tiny).__dict__ | {"clock": Clock(1.0)}))
    (line,) = suite._lines("prefill", late)
    assert line == Skipped("prefill", "no time left")


def test_a_near_tie_is_two_ulps_of_the_type():
    assert bits._near(5.0, "bfloat16") == 2 * 2.0**-5
    assert bits._near(-0.7, "float16") == 2 * 2.0**-11
    assert bits._near(5.0, "float32") == 1e-3


def test_it_runs_without_pandas_and_altair():
    code = """if 1:
        import sys
        sys.modules.update(dict.fromkeys(["pandas", "altair"]))
        import toolkit
        from toolkit.bench import suite
    """
    subprocess.run([sys.executable, "-c", code], check=True)
