"""The project's own files: what is declared, what is tracked, what an import costs."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import toolkit as tk

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
in_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout to list its files")

# Where a package is imported by another name than it is installed by.
DISTRIBUTION = {"vl_convert": "vl-convert-python"}
# Part of a declared package's own interface: mlx-lm hands out these tokenizers, ipywidgets these traits.
COMES_WITH = {
    "tokenizers": "mlx-lm",
    "transformers": "mlx-lm",
    "huggingface_hub": "mlx-lm",
    "IPython": "ipywidgets",
    "traitlets": "ipywidgets",
}


def declared() -> set[str]:
    """Names of all that pyproject.toml asks for, extras and groups included."""
    extras, groups = PROJECT["project"]["optional-dependencies"], PROJECT["dependency-groups"]
    lists = [PROJECT["project"]["dependencies"], *extras.values(), *groups.values()]
    return {re.match(r"[\w-]+", line).group() for lines in lists for line in lines if isinstance(line, str)}


def tracked() -> list[tuple[str, str]]:
    """Path and text of every tracked text file."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    files = [ROOT / name for name in names if name and (ROOT / name).is_file()]
    texts = [(file, file.read_bytes()) for file in files]
    return [(str(file.relative_to(ROOT)), data.decode()) for file, data in texts if b"\0" not in data]


# Put together here, so that this file does not match itself.
FORBIDDEN = {
    "a package index": r"(index-url|extra-index\S*|find-links)[\"\s:=]+(https?|file):|files\.python"
    + r"hosted\.org",
    "a path of somebody's machine": r"(^|[^\w.])/(work|farm|root|tmp|home/\w+|Users/\w+)" + r"/\w",
    "an open end": r"\b(TO" + r"DO|FIX" + r"ME|NotImpl" + r"ementedError)\b",
}


@in_git
@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_tracked_file_holds(what):
    pattern = re.compile(FORBIDDEN[what], re.MULTILINE)
    hits = [f"{name}: {hit.group()}" for name, text in tracked() for hit in pattern.finditer(text)]
    assert hits == []


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("a package index", "--extra-index" + "-url https" + "://example.org/simple"),
        ("a path of somebody's machine", "see " + "/root" + "/x"),
        ("an open end", "# TO" + "DO: later"),
    ],
)
def test_the_patterns_find_what_they_are_for(what, text):
    assert re.search(FORBIDDEN[what], text)


def test_every_dependency_has_a_reason_in_the_readme():
    section = (ROOT / "README.md").read_text().split("## What it depends on")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| [^|]+ \| [^|]{10,} \|$", section, re.MULTILINE)
    assert sorted(rows) == sorted(declared())


def test_every_import_is_declared():
    names = set()
    for file in (ROOT / "toolkit").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.split(".")[0])
    names -= sys.stdlib_module_names | {"toolkit"}
    wanted = {COMES_WITH.get(name) or DISTRIBUTION.get(name) or name.replace("_", "-") for name in names}
    assert "mlx" in wanted
    assert wanted <= declared()


def test_every_declared_package_has_a_pinned_version():
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+(; .+)?", line) for line in lines)
    assert declared() <= {line.split("==")[0] for line in lines}


def test_every_public_name_is_where_it_is_said_to_be():
    assert [name for name in tk.__all__ if not hasattr(tk, name)] == []
    assert set(tk.__all__) <= set(dir(tk))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tk.nothing


def test_importing_loads_nothing_heavy():
    code = "import sys, toolkit, toolkit.cohorts.plan; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert "toolkit.cohorts.plan" in loaded  # the list can tell
    assert not {"pandas", "altair", "ipywidgets", "transformers", "mlx_lm", "mlx_lm.server"} & set(loaded)


def test_every_file_that_the_design_page_names_is_there():
    text = (ROOT / "docs" / "design.md").read_text()
    rooms = [ROOT, ROOT / "toolkit", *(p for p in (ROOT / "toolkit").rglob("*") if p.is_dir())]
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", text))
    assert len(named) > 50
    assert [name for name in sorted(named) if not any((room / name).exists() for room in rooms)] == []
    assert not any((room / "planning.py").exists() for room in rooms)  # a name of before is found out


def test_the_root_of_the_package_has_few_modules_and_none_hides_a_public_function():
    modules = {path.stem for path in (ROOT / "toolkit").glob("*.py")}
    assert len(modules) <= 12
    functions = {name for name in tk.__all__ if inspect.isfunction(getattr(tk, name))}
    assert modules & functions == set()


def test_every_room_has_its_rule_in_the_first_line():
    for room in (ROOT / "toolkit").glob("*/**/__init__.py"):
        assert re.match(r'"""[A-Z][\w ]+: .{20,}', room.read_text()), room
