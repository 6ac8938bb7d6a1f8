"""The doctor's diagnosis as an object; as a command it is tested in `test_cli`."""

import json

import toolkit as tk
from toolkit.forward.packed import Unpackable
from toolkit.forward.shapes import PLAIN
from toolkit.invariance import verdict
from toolkit.study import doctor as module


def test_without_a_model_it_says_what_computes_and_promises_nothing():
    found = tk.doctor()
    assert found.ok and found.promised is None and found.to_frame().empty
    assert found.to_json()["invariance"] is None and found.to_json()["model"] is None
    assert repr(found) == f"Diagnosis({tk.backend.info()!r})"
    assert "<table" in found._repr_html_() and tk.backend.info().mlx in found._repr_html_()


def test_of_a_model_it_tells_the_verdict_and_its_checks(tiny):
    found = tk.doctor(tiny)
    assert found.ok and found.verdict.holds and "tiny is batch-invariant here, with tile" in repr(found)
    assert list(found.to_frame().columns) == ["what", "shapes", "compared", "differing", "largest"]
    assert len(found.to_frame()) == len(found.verdict.checks)
    said = json.loads(json.dumps(found.to_json(), allow_nan=False))["invariance"]
    assert said["holds"] and len(said["checks"]) == len(found.verdict.checks)


def test_it_is_not_ok_where_a_check_fails(tiny, monkeypatch):
    check = verdict.Check("linear 64 x 128", "tile 512", 12, 5, float("nan"))
    bad = verdict.Verdict(PLAIN, False, (check,), {})
    monkeypatch.setattr("toolkit.study.doctor.verdict", lambda *_, **__: bad)
    found = tk.doctor(tiny)
    assert not found.ok and "tiny is not batch-invariant here: 1 of 1 checks failed" in repr(found)
    assert (
        json.loads(json.dumps(found.to_json(), allow_nan=False))["invariance"]["checks"][0]["largest"] is None
    )


def test_it_is_not_ok_where_a_model_cannot_run_packed(tiny, monkeypatch):
    def refuse(*_):
        raise Unpackable("it keeps no keys")

    monkeypatch.setattr(module, "PackedForward", refuse)
    found = tk.doctor(tiny)
    assert not found.ok and found.verdict is None and "can't run packed: it keeps no keys" in repr(found)
