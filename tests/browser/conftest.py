"""One JupyterLab and one Chromium for all browser tests; a fresh profile for each."""

import os
import shutil
from collections.abc import Callable, Iterator

import pytest
from browser.lab import ROOT, Lab, Notebook, running
from browser.steps import RUN_ALL
from playwright.sync_api import Browser, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

MISSING = "no browser found: put chromium or google-chrome on the PATH (apt-get install chromium)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in item.path.parts:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session", autouse=True)  # session: before the lab is started
def _browser_or_reason() -> None:
    """Without a browser: skipped on a user's machine, a failure in CI, which is to bring one."""
    if not CHROMIUM:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(MISSING)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running(tmp_path_factory.mktemp("lab")) as server:
        yield server


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(lab: Lab, chromium: Browser) -> Iterator[Callable[..., Notebook]]:
    """A function that opens a notebook of the server by name; its page is closed after the test."""
    context = chromium.new_context()
    yield lambda name, **size: Notebook(context, lab, name, **size)
    context.close()


@pytest.fixture
def read(lab: Lab, opened: Callable[..., Notebook]) -> Callable[[str], Notebook]:
    """Open a notebook, run all of it, and hold it to what every notebook must do."""

    def run(name: str) -> Notebook:
        lab.add(ROOT / "notebooks" / f"{name}.ipynb")
        page = opened(f"{name}.ipynb")
        spent = page.run_all()
        print(f"\n{name}: ran in {spent:.1f} s of {RUN_ALL}")
        assert page.errors() == []
        assert page.strays == []
        return page

    return run
