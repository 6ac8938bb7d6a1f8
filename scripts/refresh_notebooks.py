"""Run every notebook in a fresh kernel and store its outputs; an unchanged notebook stays the same file.

    python scripts/refresh_notebooks.py                    # all of notebooks/
    python scripts/refresh_notebooks.py notebooks/00*.ipynb
    python scripts/refresh_notebooks.py --check            # write nothing; exit 1 where a file would change

What changes by itself is taken out: execution times, widget state, widget views, random cell ids, addresses,
progress bars. What a reader sees otherwise is kept.
"""

import argparse
import difflib
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
WIDGET = "application/vnd.jupyter.widget-view+json"
CELL_TIMEOUT = 300  # seconds; a dead kernel is noticed at once


def run(notebook: NotebookNode, directory: Path) -> NotebookNode:
    """Execute all cells, in order, in a kernel of this Python."""
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        store_widget_state=False,
        record_timing=False,
        resources={"metadata": {"path": str(directory)}},
    )
    return client.execute()


def normalise(notebook: NotebookNode) -> NotebookNode:
    """The notebook without what differs from run to run."""
    metadata = {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    notebook.metadata = nbformat.from_dict(metadata)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        cell.source = cell.source.rstrip("\n")
        kept = {k: v for k, v in cell.metadata.items() if k in ("tags", "jupyter", "collapsed")}
        cell.metadata = nbformat.from_dict(kept)
        if cell.cell_type == "code":
            cell.outputs = [kept for output in _joined(cell.outputs) if (kept := _stable(output))]
    return notebook


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Neighbouring pieces of one stream as one output: where they split depends on timing."""
    out: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and out and out[-1].get("name") == output.name:
            out[-1].text += output.text
        else:
            out.append(output)
    return out


def _stable(output: NotebookNode) -> NotebookNode | None:
    if output.output_type == "stream":
        if output.name == "stderr":  # progress bars; a warning that a reader needs goes to the prose
            return None
        return output
    if "data" in output and WIDGET in output.data:
        # A widget lives with its kernel. Its stand-in is the text form, for readers without one.
        del output.data[WIDGET]
        output.metadata.pop(WIDGET, None)
    for mime, text in list(output.get("data", {}).items()):
        if isinstance(text, str) and not mime.startswith("image/"):
            output.data[mime] = re.sub(r" at 0x[0-9a-f]+", "", text)
    return output


def text_of(notebook: NotebookNode) -> str:
    return nbformat.writes(notebook, version=4) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of notebooks/")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 where a file would change"
    )
    args = parser.parse_args()
    stale = []
    for path in args.notebooks or sorted((ROOT / "notebooks").glob("*.ipynb")):
        start = time.perf_counter()
        old = path.read_text()
        new = text_of(normalise(run(nbformat.reads(old, as_version=4), path.parent)))
        print(f"{path.name}: {time.perf_counter() - start:.0f} s, {len(new) / 1024:.0f} KB", file=sys.stderr)
        if new != old and args.check:
            stale.append(path.name)
            diff = difflib.unified_diff(
                old.splitlines(), new.splitlines(), "stored", "fresh", lineterm="", n=1
            )
            print("\n".join(line[:200] for line in list(diff)[:40]))
        elif new != old:
            part = path.with_suffix(".part")
            part.write_text(new)
            part.replace(path)
    if stale:
        print(
            f"not what a fresh run gives: {', '.join(stale)}; run scripts/refresh_notebooks.py",
            file=sys.stderr,
        )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
