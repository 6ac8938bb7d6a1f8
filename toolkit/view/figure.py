"""Figure: shows an Altair chart without a network, in JupyterLab, VS Code and static viewers.

JupyterLab 4.6 carries Vega-Lite 5; Altair writes version 6 and loads it from a content network. What the
charts here use is the same in both, so the specification is labelled version 5, checked by compiling it
with version 5.8, and shown together with a PNG (for viewers without Vega) and a sentence (for those who
don't see).
"""

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
from altair.utils import schemapi

from .charts.theme import Chart
from .png import squeeze

MIME = "application/vnd.vegalite.v5+json"
VERSION = "5.8"
Bundle = tuple[dict[str, Any], dict[str, Any]]
_SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
_EMBED = {"renderer": "svg", "actions": False}  # SVG marks carry aria-labels; a canvas has none


def spec(chart: Chart, validate: bool = True) -> dict[str, Any]:
    """The chart as a Vega-Lite 5 specification (JSON-ready)."""
    out = chart.to_dict(validate=validate)
    out["$schema"] = _SCHEMA
    return out


def quick(make: Callable[[], Chart]) -> dict[str, Any]:
    """The specification of a chart of a kind that tests validate: checking it takes as long as making it."""
    with schemapi.debug_mode(False):
        return spec(make(), validate=False)


def svg(chart: Chart) -> str:
    """The chart as SVG text."""
    return vl_convert.vegalite_to_svg(spec(chart), vl_version=VERSION)


def skeleton(out: Any) -> Any:
    """The specification without its named data: what stays when an explorer moves."""
    if isinstance(out, list):
        return [skeleton(part) for part in out]
    if not isinstance(out, dict):
        return out
    bare = {key: skeleton(part) for key, part in out.items() if key != "data"}
    if "data" in out:
        data = out["data"]
        bare["data"] = {"name": data["name"]} if isinstance(data, dict) and "name" in data else data
    return bare


def named_data(out: Any) -> dict[str, Any]:
    """The data of a specification that have names, by name."""
    found: dict[str, Any] = {}
    if isinstance(out, list):
        for part in out:
            found |= named_data(part)
    elif isinstance(out, dict):
        data = out.get("data")
        if isinstance(data, dict) and "name" in data:
            found[data["name"]] = data["values"]
        for part in out.values():
            found |= named_data(part)
    return found


def mimebundle(chart: Chart) -> Bundle:
    """Data and metadata that Jupyter displays: Vega-Lite 5, a PNG and the chart's description."""
    return _bundle(spec(chart))


def _bundle(out: dict[str, Any]) -> Bundle:
    text = out.get("description", "a chart")
    png = squeeze(vl_convert.vegalite_to_png(out, vl_version=VERSION, scale=1.5))
    data = {MIME: out, "image/png": base64.b64encode(png).decode(), "text/plain": text}
    return data, {MIME: {"embed_options": _EMBED}, "image/png": {"alt": text}}


class Figure:
    """A chart ready to show and to save.

    Parameters
    ----------
    chart : altair chart
        As the functions of `toolkit.view.charts` return it.
    """

    def __init__(self, chart: Chart):
        self.chart = chart

    def __repr__(self) -> str:
        return f"Figure({spec(self.chart).get('description', 'a chart')!r})"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        return mimebundle(self.chart)

    def save(self, path: str | os.PathLike[str], *, scale: float = 2) -> Path:
        """Write the figure; the suffix says how: .png, .svg, .html (works offline) or .json.

        Parameters
        ----------
        path : path
            Its directory must exist. An older file is replaced only when the new one is whole.
        scale : float
            Pixels per point, for .png only.
        """
        path = Path(path)
        out = spec(self.chart)
        match path.suffix:
            case ".png":
                data = squeeze(vl_convert.vegalite_to_png(out, vl_version=VERSION, scale=scale))
            case ".svg":
                data = vl_convert.vegalite_to_svg(out, vl_version=VERSION).encode()
            case ".html":
                data = vl_convert.vegalite_to_html(out, vl_version=VERSION, bundle=True).encode()
            case ".json":
                data = (json.dumps(out, indent=1, sort_keys=True) + "\n").encode()
            case other:
                raise ValueError(f"suffix {other!r} of {path.name!r}: must be .png, .svg, .html or .json")
        part = path.with_name(path.name + ".part")
        part.write_bytes(data)
        part.replace(path)
        return path


def show(chart: Chart) -> Figure:
    """The chart as a `Figure`, for the last line of a cell."""
    return Figure(chart)


def enable() -> None:
    """Let Altair show every chart this way, unless the user has chosen another renderer."""
    alt.renderers.register("toolkit", lambda out, **_: _bundle({**out, "$schema": _SCHEMA}))
    if alt.renderers.active == "default":
        alt.renderers.enable("toolkit")
