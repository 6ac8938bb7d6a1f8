"""Links of the notebooks, clicked in a JupyterLab that serves what `make lab` serves: the project's root."""

import re
import shutil
from pathlib import Path, PurePosixPath

import nbformat
import pytest
from browser.lab import ROOT, Notebook, running

NAMES = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A server of a copy of the project, so that no test can change the original."""
    copy = tmp_path_factory.mktemp("project")
    for folder in ("notebooks", "toolkit", "docs"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    with running(tmp_path_factory.mktemp("links"), copy) as server:
        yield server


def targets(path: Path) -> set[str]:
    """What a notebook's links to files outside notebooks/ lead to, as paths from the root."""
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return {str(PurePosixPath(link)) for link in re.findall(r"\]\(\.\./([^)#\s]+)", text)}


@pytest.mark.parametrize("name", NAMES)
def test_a_click_on_a_link_to_a_source_opens_it(project, chromium, name):
    context = chromium.new_context()
    page = Notebook(context, project, f"notebooks/{name}")
    links = page.page.locator(".jp-RenderedMarkdown a", has_text=re.compile(r"\w"))
    links.first.wait_for()
    expected, opened = targets(ROOT / "notebooks" / name), set()
    wanted = page.page.evaluate("""() => [...document.querySelectorAll('.jp-RenderedMarkdown a')]
        .map((link, index) => [index, link.getAttribute('data-commandlinker-args') ?? link.href])
        .filter(([, target]) => /(toolkit|docs)\\/[^"]*\\.(py|md)/.test(target)).map(([index]) => index)""")
    for index in wanted:
        page.page.evaluate("""index => {
            window.toolkitHome ??= window.jupyterapp.shell.currentWidget;
            window.jupyterapp.shell.activateById(window.toolkitHome.id);
            window.toolkitHome.node.querySelectorAll('.jp-RenderedMarkdown a')[index].click();
        }""", index)  # fmt: skip
        page.page.wait_for_function(
            "() => { const now = window.jupyterapp.shell.currentWidget;"
            " return now !== window.toolkitHome && (now?.context?.path ?? now?.content?.context?.path); }"
        )
        opened.add(
            page.page.evaluate("""() => { const now = window.jupyterapp.shell.currentWidget;
            return now.context?.path ?? now.content?.context?.path; }""")
        )
    context.close()
    assert opened == expected
