"""Backend: a fast BLAS bound before MLX loads, and the truth about what runs.

The first thing that `toolkit` imports. On a Linux CPU the MLX wheel brings a reference BLAS that is some
thirty times slower than MKL; loading another BLAS with `RTLD_GLOBAL` *before* `mlx.core` makes the dynamic
linker prefer it, and afterwards nothing does. `TOOLKIT_BLAS` names a library to bind, or `off`.
This module decides nothing about models or numerics: it binds, and it says what is there.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import re
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

_FIX = 'pip install "mlx-seed-toolkit[cpu]" brings MKL (x86-64); elsewhere install OpenBLAS'
_QUIET = 0.02  # seconds; a stream's thread took up to 5 ms to end
_LATE = "mlx was imported before toolkit, so its slow bundled BLAS stays in use: import toolkit first"


@dataclass(frozen=True)
class Backend:
    """What MLX computes with, as found by `info`.

    Attributes
    ----------
    device : {"cpu", "gpu"}
        MLX's default device.
    device_name : str
        Model of that device, as its maker names it.
    blas : str
        "mkl", "openblas", "accelerate" (macOS), "reference" (MLX's own), "none" (GPU, nothing bound), or the
        path of another library named by `TOOLKIT_BLAS`.
    blas_version, blas_path : str
        Empty where not known.
    threads : int
        Threads of the BLAS (of the CPU, under Accelerate).
    instruction_set : str
        The CPU's widest vector instructions, or the GPU's architecture.
    mlx, mlx_lm : str
        Versions.
    note : str
        Empty, or what to know and how to mend it.
    """

    device: str
    device_name: str
    blas: str
    blas_version: str
    blas_path: str
    threads: int
    instruction_set: str
    mlx: str
    mlx_lm: str
    note: str

    def __repr__(self) -> str:
        blas = " ".join(part for part in (Path(self.blas).name, self.blas_version) if part)
        return (
            f"Backend({self.device}: {self.device_name}, {self.instruction_set}; {blas}, "
            f"{self.threads} threads; mlx {self.mlx}, mlx-lm {self.mlx_lm})"
        )

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each attribute, in the order above: the table that `doctor` prints."""
        return [(f.name.replace("_", " "), str(getattr(self, f.name))) for f in fields(self)]


def bind() -> Backend:
    """Bind a fast BLAS where that is still possible, and say what runs.

    Idempotent: importing `toolkit` has bound already.

    Raises
    ------
    ValueError
        `TOOLKIT_BLAS` names something that can't be bound.
    """
    _bound()
    return info()


def info() -> Backend:
    """What MLX computes with, in this process, now."""
    import mlx.core as mx

    path, note = _bound()
    name, version, threads = _describe(path) if path else ("reference", "", 1)
    gpu = not on_cpu()
    device = mx.device_info(mx.default_device())
    if sys.platform == "darwin":
        name, threads = "accelerate", os.cpu_count() or 1
    elif gpu and not path:
        name, note = "none", ""
    return Backend(
        device="gpu" if gpu else "cpu",
        device_name=str(device.get("device_name", "")) if gpu else _cpu_name(),
        blas=name,
        blas_version=version,
        blas_path=path,
        threads=threads,
        instruction_set=str(device.get("architecture", "")) if gpu else _instruction_set(),
        mlx=_version("mlx"),
        mlx_lm=_version("mlx-lm"),
        note=note,
    )


def on_cpu() -> bool:
    """Whether MLX's default device is the CPU."""
    import mlx.core as mx

    return mx.default_device().type == mx.DeviceType.cpu


def fingerprint() -> dict[str, str | int]:
    """All that an answer's last bits may depend on besides the model: the key of cached verdicts."""
    here = info()
    settings = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_THREADING_LAYER", "OPENBLAS_CORETYPE")
    found: dict[str, str | int] = {f.name: getattr(here, f.name) for f in fields(here)}
    for place in ("blas_path", "note"):  # they move, the arithmetic does not
        del found[place]
    return found | {name: os.environ[name] for name in settings if name in os.environ}


def cache_dir() -> Path:
    """Where this project keeps what it fetched or measured; `TOOLKIT_CACHE` overrides. Not created here."""
    if chosen := os.environ.get("TOOLKIT_CACHE"):
        try:
            return Path(chosen).expanduser()
        except RuntimeError:
            raise ValueError(f"TOOLKIT_CACHE={chosen!r}: there is no such user; give a directory") from None
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "mlx-seed-toolkit"


@cache  # errors are not cached: the next call tries again
def _bound() -> tuple[str, str]:
    """Path of the BLAS that MLX gets ("" is its own) and a note; binds it on the first call."""
    wanted = os.environ.get("TOOLKIT_BLAS", "")
    if wanted == "off":
        return "", "TOOLKIT_BLAS=off: nothing was bound"
    if sys.platform != "linux":
        if wanted:
            raise ValueError(f"TOOLKIT_BLAS={wanted}: must be off or unset here; MLX uses the system's BLAS")
        return "", ""
    if "mlx.core" in sys.modules:
        if os.environ.get("LD_PRELOAD") and _global_cblas():
            return _global_cblas(), ""
        if on_cpu():
            warnings.warn(_LATE, RuntimeWarning, stacklevel=4)  # the line that imports toolkit
        return "", _LATE
    if wanted:
        _load_wanted(wanted)
    elif not _global_cblas():  # the first library loaded wins: one that is there already can't be outdone
        for candidate in _candidates():
            if _load(candidate):
                break
    path = _global_cblas()
    if wanted and path and not os.path.samefile(path, wanted):
        return path, f"TOOLKIT_BLAS={wanted} has no effect: {path} was loaded earlier"
    return path, "" if path else f"MLX's slow bundled BLAS is in use: {_FIX}"


def _load_wanted(path: str) -> None:
    allowed = "must be off, or the path of a shared library with cblas_sgemm and 32-bit integers"
    if not os.path.isfile(path):
        raise ValueError(f"TOOLKIT_BLAS={path}: no such file; {allowed}")
    if not _load(path):
        raise ValueError(f"TOOLKIT_BLAS={path}: not a BLAS that can be bound; {allowed}")


def _load(path: str) -> bool:
    """Load a library into the global scope if MLX could call it; look before, as a load can't be undone."""
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return False
    if not hasattr(library, "cblas_sgemm") or _takes_long_integers(library):
        return False
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return True


def _takes_long_integers(library: ctypes.CDLL) -> bool:
    if hasattr(library, "MKL_Set_Interface_Layer"):
        library.MKL_Set_Interface_Layer(0)  # 32-bit integers, whatever MKL_INTERFACE_LAYER says
        return False
    return hasattr(library, "openblas_get_config") and b"USE64BITINT" in _text(library, "openblas_get_config")


def _candidates() -> Iterator[str]:
    """MKL, then OpenBLAS: this environment's (pip and conda put them under lib), then the system's."""
    lib = Path(sys.prefix) / "lib"
    for pattern in ("libmkl_rt.so*", "libopenblas.so*"):
        yield from sorted(map(str, lib.glob(pattern)), reverse=True)
    yield from ("libmkl_rt.so.3", "libmkl_rt.so.2", "libopenblas.so.0")


class _DlInfo(ctypes.Structure):
    _fields_ = [
        ("fname", ctypes.c_char_p),
        ("fbase", ctypes.c_void_p),
        ("sname", ctypes.c_char_p),
        ("saddr", ctypes.c_void_p),
    ]


def _global_cblas() -> str:
    """File that a global look-up of cblas_sgemm ends in, as it will for libmlx; "" if in none."""
    everything = ctypes.CDLL(None)
    try:
        address = ctypes.cast(everything.cblas_sgemm, ctypes.c_void_p)
        found = _DlInfo()
        return os.fsdecode(found.fname) if everything.dladdr(address, ctypes.byref(found)) else ""
    except AttributeError:
        return ""


def _describe(path: str) -> tuple[str, str, int]:
    """Name, version and threads of a loaded BLAS."""
    library = ctypes.CDLL(path)
    if hasattr(library, "MKL_Get_Version_String"):
        text = ctypes.create_string_buffer(200)
        library.MKL_Get_Version_String(text, len(text))
        name, words, threads = "mkl", text.value, library.MKL_Get_Max_Threads()
    elif hasattr(library, "openblas_get_config"):
        name, words = "openblas", _text(library, "openblas_get_config")
        threads = library.openblas_get_num_threads()
    else:
        return path, "", 1
    found = re.search(r"\d+(\.\d+)+", words.decode(errors="replace"))
    return name, found.group() if found else "", threads


def _text(library: ctypes.CDLL, function: str) -> bytes:
    call = library[function]
    call.restype = ctypes.c_char_p
    return call() or b""


@cache
def _cpuinfo() -> dict[str, str]:
    """The first processor's lines of Linux's /proc/cpuinfo; empty elsewhere."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    return {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in first.splitlines())}


def _cpu_name() -> str:
    import mlx.core as mx

    if name := _cpuinfo().get("model name"):
        return name
    return str(mx.device_info(mx.Device(mx.DeviceType.cpu)).get("device_name", "")) or platform.machine()


def _instruction_set() -> str:
    flags = (_cpuinfo().get("flags") or _cpuinfo().get("Features") or "").split()
    widest = ("avx512f", "avx2", "avx", "sse4_2", "sve", "asimd")
    return next((flag for flag in widest if flag in flags), platform.machine())


@atexit.register
def _settle() -> None:
    """Wait, at exit, until threads that computed with MLX have ended for the operating system too.

    `Thread.join` returns before a thread's own streams are destroyed (before Python 3.13), and a process that
    ends meanwhile is aborted: "terminate called without an active exception". So this waits until the set of
    the process's threads has not changed for `_QUIET` seconds.
    """
    if "mlx.core" not in sys.modules:
        return
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():  # macOS
        time.sleep(2 * _QUIET)
        return
    before, since, end = set[str](), time.monotonic(), time.monotonic() + 1
    while time.monotonic() < min(since + _QUIET, end):
        now = {task.name for task in tasks.iterdir()}
        if now != before:
            before, since = now, time.monotonic()
        time.sleep(0.002)


@cache
def _version(distribution: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # 50 ms, needed only when asked

    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _allow_few_files() -> None:
    """Let mlx-lm be imported where a process may not open as many files as it asks for (2,048 to 4,096)."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= 4096:
        return
    real = resource.setrlimit

    def limited(which: int, limits: tuple[int, int]) -> None:
        files = which == resource.RLIMIT_NOFILE
        real(which, (min(limits[0], hard), min(limits[1], hard)) if files else limits)

    resource.setrlimit = limited


_allow_few_files()
with suppress(ValueError):  # raised again at first use, where a command line can put it in one line
    _bound()
