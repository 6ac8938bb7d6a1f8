"""Picture: a widget that shows an SVG and says which of its marks was clicked.

Vega-Lite runs in the kernel's process (`figure.svg`), so a page loads no chart library, a redraw sends some
10 KB, and marks keep the aria-labels that readers and tests go by. A mark can be clicked, or focused with
the Tab key and pressed with Enter.
"""

import anywidget
import traitlets

_SCRIPT = """
function render({ model, el }) {
  el.classList.add("toolkit-picture");
  const draw = () => {
    el.innerHTML = model.get("svg");
    const svg = el.querySelector("svg");
    if (svg) {
      svg.setAttribute("role", "group");
      svg.setAttribute("aria-label", model.get("alt"));
      svg.style.maxWidth = "100%";
      svg.style.height = "auto";
    }
    const words = model.get("selector");
    if (words) for (const mark of el.querySelectorAll(words)) {
      mark.setAttribute("tabindex", "0");
      mark.style.cursor = "pointer";
    }
    el.dataset.drawn = model.get("drawn");
  };
  const click = (event) => {
    const words = model.get("selector");
    const mark = words && event.target.closest(words);
    if (!mark || !mark.getAttribute("aria-label")) return;
    const count = (model.get("clicked").count || 0) + 1;
    model.set("clicked", { label: mark.getAttribute("aria-label"), count });
    model.save_changes();
  };
  const key = (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    click(event);
  };
  el.addEventListener("click", click);
  el.addEventListener("keydown", key);
  model.on("change:drawn", draw);
  draw();
  return () => model.off("change:drawn", draw);
}
export default { render };
"""


class Picture(anywidget.AnyWidget):
    """An SVG on the page.

    Attributes
    ----------
    svg, alt : str
        What is drawn, and what it shows, in words. Set both with `draw`.
    selector : str
        CSS selector of the marks that can be clicked; "" for none.
    clicked : dict
        The last click: `label`, the mark's aria-label, and `count`. Observe it.
    """

    _esm = _SCRIPT
    svg = traitlets.Unicode().tag(sync=True)
    alt = traitlets.Unicode().tag(sync=True)
    selector = traitlets.Unicode().tag(sync=True)
    drawn = traitlets.Int(0).tag(sync=True)
    clicked = traitlets.Dict().tag(sync=True)

    def draw(self, svg: str, alt: str) -> None:
        """Show another picture, in one message to the page."""
        with self.hold_sync():
            self.svg, self.alt, self.drawn = svg, alt, self.drawn + 1
