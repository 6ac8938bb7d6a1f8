"""Build the course as a static site that works offline: a page for each notebook, and an index.

    python scripts/build_site.py              # into _site/
    python scripts/build_site.py elsewhere

Pages are made from the outputs that the notebooks are committed with, so nothing is run. A picture is the
stored PNG; a page asks nothing of any other server, has a style for light and dark, and fits a phone.
"""

import argparse
import html
import re
import shutil
import sys
from pathlib import Path

import nbformat
from nbconvert.filters.highlight import Highlight2HTML
from nbconvert.filters.markdown import markdown2html
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
STYLE = (ROOT / "scripts" / "site.css").read_text()
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body>
<nav aria-label="Course">{links}</nav>
<main>
{body}
</main>
<nav class="end" aria-label="Onwards">{links}</nav>
</body></html>
"""


LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)((?:#[^)]*)?)\)")  # a relative link, in Markdown
INDEX = "README.md"
_highlight = Highlight2HTML()


def build(out: Path, root: Path = ROOT) -> list[Path]:
    """Write the site, replacing an older one, and return its pages.

    Parameters
    ----------
    out : path
        A directory; what is in it goes, so it must be empty or a site.
    root : path
        Of the project: its notebooks/, and the files that they link to.
    """
    if out.exists() and any(out.iterdir()) and not (out / "index.html").is_file():
        raise SystemExit(f"{out}: has files but no index.html, so it is no site; choose another directory")
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    notebooks = {
        path.stem: nbformat.read(path, as_version=4) for path in sorted((root / "notebooks").glob("*.ipynb"))
    }
    sources: set[Path] = set()
    links = navigation(notebooks)
    pages = {"index.html": ("Seeds, batches and bits: a course",
                            markdown((root / "notebooks" / INDEX).read_text(), root, sources))}  # fmt: skip
    for name, notebook in notebooks.items():
        pages[f"{name}.html"] = title_of(notebook), body_of(notebook, root, sources)
    for source in sorted(sources):
        name, code = source.relative_to(root).as_posix(), source.read_text()
        shown = sections(code) if source.suffix == ".md" else _highlight(code)
        body = f"<h1><code>{html.escape(name)}</code></h1>{shown}"
        pages[source_page(source, root)] = name, body
    for name, (title, body) in pages.items():
        deep = "../" if "/" in name else ""
        text = PAGE.format(
            title=html.escape(title), style=STYLE, links=links.replace('href="', f'href="{deep}'), body=body
        )
        path = part / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)
    return [out / name for name in pages]


def sections(text: str) -> str:
    """A Markdown source, a part per heading, with the id that code hosts give that heading."""
    out = []
    for part in re.split(r"(?m)^(?=##+ )", text):
        heading = part.partition("\n")[0].lstrip("# ").lower() if part.startswith("##") else ""
        anchor = re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-")
        out.append(f'<div id="{anchor}">{_highlight(part)}</div>' if anchor else _highlight(part))
    return "".join(out)


def title_of(notebook: NotebookNode) -> str:
    return str(notebook.cells[0].source.splitlines()[0].lstrip("# "))


def navigation(notebooks: dict[str, NotebookNode]) -> str:
    """Links to the index and all pages, by their numbers."""
    short = {name: title_of(notebook).partition(":")[0] for name, notebook in notebooks.items()}
    return '<a href="index.html">Course</a> ' + " ".join(
        f'<a href="{name}.html">{html.escape(title)}</a>' for name, title in short.items()
    )


def body_of(notebook: NotebookNode, root: Path, sources: set[Path]) -> str:
    """A notebook's cells as HTML."""
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(markdown(cell.source, root, sources))
            continue
        code = _highlight(cell.source)
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            code = f"<details class='code'><summary>The check, as code</summary>{code}</details>"
        parts.append(code + "".join(output_of(output) for output in cell.outputs))
    return "\n".join(parts)


def markdown(text: str, root: Path, sources: set[Path]) -> str:
    """Markdown as HTML, relative links led to pages of the site; files linked to are added to `sources`."""

    def lead(match: re.Match[str]) -> str:
        target, anchor = match.groups()
        if target.endswith(".ipynb"):
            return f"]({target.removesuffix('.ipynb')}.html{anchor})"
        if target == INDEX:
            return f"](index.html{anchor})"
        path = (root / "notebooks" / target).resolve()
        if not path.is_file():
            raise SystemExit(f"notebooks: link to {target!r}, which is not a file")
        sources.add(path)
        return f"]({source_page(path, root)}{anchor})"

    made = str(markdown2html(LINK.sub(lead, text)))
    return made.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")


def source_page(path: Path, root: Path) -> str:
    return "source/" + path.relative_to(root).as_posix().replace("/", "-") + ".html"


def output_of(output: NotebookNode) -> str:
    """An output as its picture with its sentence, its table, or its text."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    text = data.get("text/plain", "")
    if "image/png" in data:
        words = html.escape(re.sub(r"^\w+Explorer: ", "", text.strip()))
        source = f"data:image/png;base64,{data['image/png'].strip()}"
        inner = f'<img alt="{words}" src="{source}"><p class="caption">{words}</p>'
    elif "<table" in data.get("text/html", ""):
        inner = re.sub(r"<style.*?</style>", "", data["text/html"], flags=re.S)
    else:
        inner = f"<pre>{html.escape(text.rstrip())}</pre>" if text.strip() else ""
    return f'<div class="output">{inner}</div>' if inner else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "_site", help="default: _site/")
    pages = build(parser.parse_args().out)
    print(f"{len(pages)} pages; open {pages[0]}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
