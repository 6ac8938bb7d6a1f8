"""Models that many tests share, loaded when first asked for. `toolkit` comes first: it binds the BLAS."""

import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

import toolkit as tk


@pytest.fixture(scope="session")
def tiny() -> "tk.Model":
    """A small llama with random weights and a byte tokenizer, made in milliseconds."""
    return tk.load("tiny")


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that makes a module's function raise KeyboardInterrupt when it is called that many times."""

    def plant(module: str, name: str, call: int) -> None:
        within = sys.modules[module]  # its package may have a function of that name
        real, calls = getattr(within, name), itertools.count(1)

        def run(*args: Any) -> Any:
            if next(calls) == call:
                raise KeyboardInterrupt
            return real(*args)

        monkeypatch.setattr(within, name, run)

    return plant


@pytest.fixture(scope="session")
def smollm2() -> "tk.Model":
    """The default model; whoever uses it is marked `real`."""
    return tk.load("smollm2")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave at once: MLX may abort a process whose threads have computed, at its exit."""
    if _STATUS in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_STATUS])


_STATUS = pytest.StashKey[int]()
