"""What `toolkit.backend` binds and says. Each case needs a process in which MLX is not loaded yet."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit import backend

MKL = sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*"))
needs_mkl = pytest.mark.skipif(not MKL, reason="MKL is not installed here: pip install mlx-seed-toolkit[cpu]")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a BLAS to bind")

MATMUL = """
import mlx.core as mx
a = mx.arange(64.0).reshape(8, 8)
print("right" if (a @ mx.eye(8) == a).all().item() else "wrong")
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter without the caller's BLAS settings."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TOOLKIT_", "MKL_", "LD_"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean | env,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def bindings(tmp_path: Path, **env: str) -> str:
    """The dynamic linker's own record of where libmlx's cblas_sgemm went."""
    done = run(
        "import toolkit" + MATMUL, LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(tmp_path / "linker"), **env
    )
    assert done.stdout == "right\n", done.stderr
    logs = "".join(path.read_text(errors="replace") for path in tmp_path.glob("linker.*"))
    (library,) = set(re.findall(r"libmlx\.so \[0\] to (\S+) .*cblas_sgemm'", logs))
    return library


@on_linux
@needs_mkl
def test_mlx_calls_mkl_once_toolkit_is_imported_first(tmp_path):
    (tmp_path / "on").mkdir()
    (tmp_path / "off").mkdir()
    assert "libmkl_rt" in bindings(tmp_path / "on")
    assert "libmkl_rt" not in bindings(tmp_path / "off", TOOLKIT_BLAS="off")  # the record can tell


@on_linux
@needs_mkl
def test_info_names_the_library_that_is_loaded():
    done = run(
        "import toolkit\n"
        "b = toolkit.backend.info()\n"
        "print(b.blas, b.threads > 0, b.blas_path in open('/proc/self/maps').read(), repr(b.note))"
    )
    assert done.stdout == "mkl True True ''\n", done.stderr


@on_linux
def test_off_binds_nothing():
    done = run(
        "import toolkit; b = toolkit.backend.info(); print(b.blas_path or 'nothing')" + MATMUL,
        TOOLKIT_BLAS="off",
    )
    assert done.stdout == "nothing\nright\n", done.stderr


@on_linux
def test_a_path_is_bound_before_what_is_installed(tmp_path):
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to make a library with")
    source, library = tmp_path / "blas.cpp", tmp_path / "libmine.so"
    source.write_text('extern "C" void cblas_sgemm() {}\n')
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    done = run("import toolkit; b = toolkit.backend.info(); print(b.blas, b.note)", TOOLKIT_BLAS=str(library))
    assert done.stdout == f"{library} \n", done.stderr


@on_linux
@pytest.mark.parametrize("kind", ["missing", "directory", "text", "no-blas"])
def test_a_path_that_cannot_be_bound_is_one_clear_line_at_first_use(tmp_path, kind):
    path = {"missing": tmp_path / "none.so", "directory": tmp_path, "text": tmp_path / "text.so"}.get(kind)
    if kind == "text":
        path.write_text("not a library")
    elif kind == "no-blas":
        import _ctypes

        path = _ctypes.__file__
    imported = run("import toolkit, sys; print('mlx.core' in sys.modules)", TOOLKIT_BLAS=str(path))
    assert imported.stdout == "False\n", imported.stderr
    used = run("import toolkit; toolkit.Request", TOOLKIT_BLAS=str(path))
    assert used.returncode == 1
    assert used.stderr.splitlines()[-1].startswith(f"ValueError: TOOLKIT_BLAS={path}: ")
    assert "must be off, or the path" in used.stderr.splitlines()[-1]


@on_linux
@pytest.mark.skipif(not backend.on_cpu(), reason="on a GPU the order does not matter")
def test_mlx_first_warns_once_and_names_the_fix():
    done = run(
        "import mlx.core\nimport toolkit\ntoolkit.backend.bind()\n"
        "b = toolkit.backend.info(); print(b.blas, '|', b.note)"
    )
    assert done.stdout.startswith("reference | mlx was imported before toolkit")
    assert done.stderr.count("RuntimeWarning") == 1
    assert "<string>:2: RuntimeWarning" in done.stderr  # the caller's import, not a line of ours
    assert "import toolkit first" in done.stderr


@on_linux
@needs_mkl
def test_wide_integers_asked_of_mkl_do_not_reach_mlx():
    assert run("import toolkit" + MATMUL, MKL_INTERFACE_LAYER="ILP64").stdout == "right\n"


def test_the_fingerprint_has_no_path_and_follows_the_settings(monkeypatch):
    before = backend.fingerprint()
    assert {"device", "instruction_set", "threads", "blas", "blas_version", "mlx", "mlx_lm"} <= set(before)
    assert not any(str(value).startswith("/") for value in before.values())
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert backend.fingerprint() == before | {"MKL_CBWR": "COMPATIBLE"}


def test_rows_cover_every_attribute_and_repr_is_one_short_line():
    here = backend.info()
    assert [name for name, _ in here.rows()][:2] == ["device", "device name"]
    assert len(here.rows()) == 10
    assert "\n" not in repr(here) and len(repr(here)) < 200


def test_the_cache_can_be_moved(monkeypatch, tmp_path):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "x"))
    assert backend.cache_dir() == tmp_path / "x"
    monkeypatch.delenv("TOOLKIT_CACHE")
    assert backend.cache_dir().name == "mlx-seed-toolkit"


COMPUTES_IN_THREADS = """
import toolkit
import mlx.core as mx
from concurrent.futures import ThreadPoolExecutor

def compute(_):
    a = mx.random.normal((64, 64))
    return (a @ a).sum().item()

pool = ThreadPoolExecutor(2)
print(len(list(pool.map(compute, range(8)))))
"""


def statuses(code, count):
    run = [sys.executable, "-c", code]
    return [subprocess.run(run, capture_output=True).returncode for _ in range(count)]


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Thread.join waits for the operating system's thread")
@pytest.mark.skipif(not backend.on_cpu(), reason="only threads of a CPU's streams abort the process")
def test_a_script_that_computed_in_threads_ends_with_its_own_status():
    assert statuses(COMPUTES_IN_THREADS, 40) == [0] * 40
    assert statuses(COMPUTES_IN_THREADS + "raise SystemExit(3)", 5) == [3] * 5


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Thread.join waits for the operating system's thread")
@pytest.mark.skipif(not backend.on_cpu(), reason="only threads of a CPU's streams abort the process")
def test_without_waiting_such_a_script_is_aborted_now_and_then():
    code = COMPUTES_IN_THREADS + "import atexit; atexit.unregister(toolkit.backend._settle)"
    assert any(status == -6 for status in statuses(code, 60))  # 12 of 40 were, on two cores
