"""Explorer: what all explorers share. Controls left, a picture right, one line of words under it.

Callbacks of widgets may come on any thread, while MLX's streams and generator belong to one. So all explorers
compute on one thread of their own: arrays meet no other stream, and the notebook's generator is left alone.
Changes that come while it computes are drawn together afterwards: the picture follows the last one.
"""

from __future__ import annotations

import base64
import html
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import ipywidgets as widgets
import vl_convert

from ..charts.theme import Chart, Records
from ..figure import VERSION, named_data, quick, skeleton, spec
from ..picture import Picture
from ..png import squeeze

_THREAD = ThreadPoolExecutor(1, thread_name_prefix="explorers")
_BUSY_AFTER = 0.2  # seconds
WIDE = widgets.Layout(width="285px")
STYLE = {"description_width": "100px"}
T = TypeVar("T")


class Explorer:
    """Base of the explorers; a subclass makes its controls and says what they show.

    Attributes
    ----------
    box : ipywidgets widget
        Everything, for the page.
    picture : Picture
    words : str
        The line under the picture: what it shows now.
    """

    def __init__(self, controls: Sequence[widgets.Widget], selector: str = ""):
        self.picture = Picture(selector=selector)
        self.words = ""
        self._error: Exception | None = None
        self._line = widgets.HTML()
        self._busy = widgets.HTML("<span role='status'></span>")
        self._lock = threading.Lock()
        self._queued: Future[None] | None = None
        self._specs: OrderedDict[Any, tuple[dict[str, Any], dict[str, Records]]] = OrderedDict()
        self._kept: OrderedDict[Any, Any] = OrderedDict()
        left = widgets.VBox([*controls, self._busy], layout=widgets.Layout(width="300px", flex="0 0 auto"))
        right = widgets.VBox(
            [self.picture, self._line], layout=widgets.Layout(flex="1 1 460px", min_width="0")
        )
        self.box = widgets.Box([left, right], layout=widgets.Layout(display="flex", flex_flow="row wrap"))
        self.box.add_class("toolkit-explorer")
        for control in _leaves(controls):
            if control.has_trait("value"):
                control.observe(self._changed, "value")
        self.wait()

    # For subclasses

    def show(self) -> str:
        """Read the controls, compute, and `draw`; runs on the explorers' thread. Return the words."""
        raise TypeError(f"{type(self).__name__} must define show()")

    def draw(self, kind: Any, chart: Callable[[], Chart], data: dict[str, Records], alt: str) -> None:
        """Show data in a chart that is built once for each kind of picture.

        Parameters
        ----------
        kind : hashable
            Of what the chart depends on, besides its data.
        chart : function
            Makes it, with the data.
        data : dict of str to list of dict
            What differs within a kind, by name.
        alt : str
            The picture in words.
        """
        self._chart = chart
        if kind not in self._specs:
            whole = quick(chart)
            _remember(self._specs, kind, (skeleton(whole), named_data(whole)))
        bare, rest = self._specs[kind]
        self.picture.draw(bare, rest | data, alt)

    def cached(self, key: Any, make: Callable[[], T]) -> T:
        """A value by what it depends on; the newest 24 are kept."""
        if key not in self._kept:
            _remember(self._kept, key, make())
        self._kept.move_to_end(key)
        value: T = self._kept[key]
        return value

    # From a change to a picture

    def _changed(self, _: Any) -> None:
        self._submit()

    def _submit(self) -> Future[None]:
        with self._lock:
            if self._queued is None:
                self._queued = _THREAD.submit(self._work)
            return self._queued

    def _work(self) -> None:
        with self._lock:
            self._queued = None
        busy = threading.Timer(_BUSY_AFTER, self._say_busy, [True])
        busy.start()
        try:
            words = self.show()
            self._error = None
        except Exception as error:  # no one above would see it: say it on the page, keep the last picture
            self._error, words = error, f"⚠ {error}"
        finally:
            busy.cancel()
            if self._busy.value != _status(False):
                self._say_busy(False)
        if words != self.words:
            self.words = words
            self._line.value = f"<p aria-live='polite' class='toolkit-words'>{html.escape(words)}</p>"

    def _say_busy(self, busy: bool) -> None:
        self._busy.value = _status(busy)

    def wait(self) -> None:
        """Until every change made so far is drawn; raises what went wrong with the last."""
        self._submit().result()
        if self._error is not None:
            raise self._error

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.words}"

    def _repr_mimebundle_(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The live widget; where there's no kernel, the picture as it was, its alternative text the words."""
        bundle: dict[str, Any] = self.box._repr_mimebundle_(**options)
        png = squeeze(vl_convert.vegalite_to_png(spec(self._chart()), vl_version=VERSION, scale=1.5))
        data = {**bundle, "text/plain": repr(self), "image/png": base64.b64encode(png).decode()}
        return data, {"image/png": {"alt": self.words}}


def _status(busy: bool) -> str:
    return f"<span role='status'>{'⏳ computing…' if busy else ''}</span>"


def _leaves(controls: Sequence[widgets.Widget]) -> list[widgets.Widget]:
    out: list[widgets.Widget] = []
    for control in controls:
        out += _leaves(control.children) if isinstance(control, widgets.Box) else [control]
    return out


def _remember(cache: OrderedDict[Any, Any], key: Any, value: Any, limit: int = 24) -> None:
    cache[key] = value
    while len(cache) > limit:
        cache.popitem(last=False)


def text(description: str, value: str) -> widgets.Text:
    return widgets.Text(value, description=description, continuous_update=False, layout=WIDE, style=STYLE)


def seed(description: str, value: int) -> widgets.IntText:
    return widgets.IntText(value, description=description, layout=WIDE, style=STYLE)


def whole(description: str, value: int, low: int, high: int, step: int = 1) -> widgets.IntSlider:
    return widgets.IntSlider(value, low, high, step, description=description, layout=WIDE, style=STYLE)


def number(description: str, value: float, low: float, high: float, step: float) -> widgets.FloatSlider:
    return widgets.FloatSlider(
        value=value,
        min=low,
        max=high,
        step=step,
        description=description,
        readout_format=".2f",
        layout=WIDE,
        style=STYLE,
    )


def choice(description: str, options: Sequence[str], value: str) -> widgets.Dropdown:
    return widgets.Dropdown(options=options, value=value, description=description, layout=WIDE, style=STYLE)
