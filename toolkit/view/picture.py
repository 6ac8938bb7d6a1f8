"""Picture: a widget that shows a chart, replaces its data in place, and says which mark was clicked.

The browser draws, so a redraw costs the kernel a small message; the chart library comes out of the installed
`vl-convert`, once a page, without a network. Marks keep the aria-labels that readers and tests go by, and
those that can be clicked can be reached with the Tab key and pressed with Enter.
"""

from functools import cache
from pathlib import Path
from typing import Any

import anywidget
import traitlets
import vl_convert

from .figure import VERSION


@cache
def _library() -> str:
    return vl_convert.javascript_bundle("export const embed = vegaEmbed;", vl_version=VERSION)


class Picture(anywidget.AnyWidget):
    """A chart on the page.

    Attributes
    ----------
    selector : str
        CSS selector of the marks that can be clicked; "" for none.
    clicked : dict
        The last click: `label`, the mark's aria-label, and `count`. Observe it.
    drawn : int
        Counts the pictures; the page's `data-drawn` follows when one is on the screen.
    """

    _esm = Path(__file__).with_suffix(".js").read_text()
    spec = traitlets.Dict().tag(sync=True)
    data = traitlets.Dict().tag(sync=True)
    alt = traitlets.Unicode().tag(sync=True)
    selector = traitlets.Unicode().tag(sync=True)
    drawn = traitlets.Int(0).tag(sync=True)
    clicked = traitlets.Dict().tag(sync=True)

    def __init__(self, **traits: Any):
        super().__init__(**traits)
        self.on_msg(self._answer)

    def _answer(self, _: Any, content: dict[str, Any], __: Any) -> None:
        if content.get("type") == "library":
            self.send({"type": "library", "text": _library()})

    def draw(self, spec: dict[str, Any], data: dict[str, Any], alt: str) -> None:
        """Show other data, or another chart, in one message to the page.

        Parameters
        ----------
        spec : dict
            Of the chart, without its data. Equal to the last one, only the data travel.
        data : dict of str to list of dict
            Rows by the names that the specification gives them.
        alt : str
            What the picture shows, in words.
        """
        with self.hold_sync():
            self.spec = spec  # a trait that does not change is not sent
            self.data, self.alt, self.drawn = data, alt, self.drawn + 1
