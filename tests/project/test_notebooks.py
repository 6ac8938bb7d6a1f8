"""Notebooks as files: what a reader gets before running them; and that the checks around them have teeth."""

import ast
import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LIMIT = 300 * 1024  # bytes
refresh_path = ROOT / "scripts" / "refresh_notebooks.py"
_spec = importlib.util.spec_from_file_location("refresh_notebooks", refresh_path)
refresh = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(refresh)


def faults(notebook, size: int = 0) -> list[str]:
    """Everything that is wrong with a stored notebook, one line each; empty where all is well."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if not code:
        return ["no code cell"]
    out = [] if size < LIMIT else [f"{size // 1024} KB: must be under {LIMIT // 1024}"]
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        out.append(f"execution counts {counts}: every code cell must have run, once, in order")
    for number, cell in enumerate(code, 1):
        for output in cell.outputs:
            if output.output_type == "error":
                out.append(f"code cell {number}: stored error {output.ename}")
            if output.get("name") == "stderr":
                out.append(f"code cell {number}: output on standard error")
        if "widget-view" in json.dumps(cell.outputs):
            out.append(f"code cell {number}: a widget view, which no reader can open")
    if "widgets" in notebook.metadata:
        out.append("widget state in the metadata")
    if not isinstance(ast.parse(code[0].source).body[0], ast.Import | ast.ImportFrom):
        out.append("the first code cell must import")
    if not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(code[-1].source))):
        out.append("the last code cell must assert what was claimed")
    if notebook.cells[0].cell_type != "markdown" or not notebook.cells[0].source.startswith("# "):
        out.append("the first cell must be a title")
    return out


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_notebook_is_clean_and_whole(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert faults(notebook, path.stat().st_size) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_stored_notebook_is_in_normal_form(path):
    text = path.read_text()
    assert refresh.text_of(refresh.normalise(nbformat.reads(text, as_version=4))) == text


def links(text: str) -> set[str]:
    """Targets of a Markdown text's relative links, without their anchors."""
    return set(re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text))


def test_the_course_leads_from_the_first_notebook_to_all_others_and_from_each_to_the_next():
    texts = {}
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        texts[path.name] = [cell.source for cell in cells if cell.cell_type == "markdown"]
    names = list(texts)
    assert set(names[1:]) <= links(texts[names[0]][0])
    for name, following in itertools.pairwise(names):
        assert following in links(texts[name][-1]), f"the end of {name} does not lead to {following}"
    assert "notebooks/00_quickstart.ipynb" in links((ROOT / "README.md").read_text())


def test_make_lab_serves_the_sources_and_opens_the_first_notebook():
    recipe = re.search(r"(?m)^lab:.*\n\t(.*)$", (ROOT / "Makefile").read_text())[1]
    assert "--ServerApp.root_dir=." in recipe.split()  # not notebooks/: its links to ../toolkit would be dead
    assert f"/lab/tree/notebooks/{NOTEBOOKS[0].name}" in recipe


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_stored_picture_has_a_text_alternative(path):
    for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                assert output.metadata.get("image/png", {}).get("alt"), f"cell {number}"


def clean_notebook():
    ran = new_output("stream", name="stdout", text="2\n")
    return new_notebook(
        cells=[
            new_markdown_cell("# Title"),
            new_code_cell("import math", execution_count=1),
            new_code_cell("print(2)", execution_count=2, outputs=[ran]),
            new_code_cell("assert math.tau > 6", execution_count=3),
        ]
    )


def spoil_order(nb):
    nb.cells[2].execution_count = 7


def spoil_by_stripping(nb):
    nb.cells[2].execution_count = None


def spoil_with_error(nb):
    nb.cells[2].outputs = [new_output("error", ename="E", evalue="", traceback=[])]


def spoil_with_stderr(nb):
    nb.cells[2].outputs[0].name = "stderr"


def spoil_with_widget_view(nb):
    nb.cells[2].outputs = [new_output("display_data", {refresh.WIDGET: {}})]


def spoil_with_widget_state(nb):
    nb.metadata["widgets"] = {}


def spoil_imports(nb):
    nb.cells[1].source = "x = 1"


def spoil_asserts(nb):
    nb.cells[3].source = "math.tau"


def spoil_title(nb):
    nb.cells[0].source = "text"


SPOILERS = [f for name, f in sorted(globals().items()) if name.startswith("spoil_")]


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda f: f.__name__)
def test_the_hygiene_check_sees_each_fault(spoil):
    notebook = clean_notebook()
    assert faults(notebook) == []
    assert faults(notebook, LIMIT) != []
    spoil(notebook)
    assert len(faults(notebook)) == 1


def messy_notebook():
    """One whose raw outputs differ from run to run: time, addresses, ids, widgets, streams in pieces."""
    source = ["import sys, time", "from IPython.display import display\nimport ipywidgets",
              "for i in range(3):\n    print(i, flush=True)\n    time.sleep(0.02)",
              "print('noise', time.time(), file=sys.stderr)\nobject()", "display(ipywidgets.IntSlider())",
              "assert True"]  # fmt: skip
    return new_notebook(cells=[new_markdown_cell("# Messy"), *(new_code_cell(s) for s in source)])


def refresh_file(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(refresh_path), str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.notebooks
def test_refreshing_twice_gives_the_same_file_and_check_sees_a_change(tmp_path):
    path = tmp_path / "messy.ipynb"
    nbformat.write(messy_notebook(), path)
    assert refresh_file(path).returncode == 0
    first = path.read_text()
    assert faults(nbformat.reads(first, as_version=4)) == []
    assert refresh_file(path, "--check").returncode == 0
    assert path.read_text() == first
    path.write_text(first.replace("0\\n", "5\\n"))
    checked = refresh_file(path, "--check")
    assert checked.returncode == 1 and "messy.ipynb" in checked.stderr


@pytest.mark.notebooks
def test_a_dying_kernel_fails_within_a_minute_and_names_the_cell(tmp_path):
    shutil.copy(ROOT / "notebooks" / "conftest.py", tmp_path)
    cells = ["import os, signal", "os.kill(os.getpid(), signal.SIGKILL)", "assert True"]
    notebook = new_notebook(cells=[new_code_cell(c, execution_count=i) for i, c in enumerate(cells, 1)])
    nbformat.write(notebook, tmp_path / "dies.ipynb")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--nbval",
        "--nbval-current-env",
    ]
    command += [str(tmp_path), "--rootdir", str(tmp_path)]
    start = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert time.monotonic() - start < 60
    assert result.returncode == 1
    assert "FAILED" in result.stdout and "Cell 1" in result.stdout and "the kernel died" in result.stdout
