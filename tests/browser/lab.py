"""A JupyterLab of its own and a page on it, for browser tests: start, run all, move controls, read figures.

The server listens on 127.0.0.1 with a token, its settings, data and IPython directories are private, and the
page may not leave the loopback: requests that try are aborted and counted.
"""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, Locator, Page, Route

ROOT = Path(__file__).parent.parent.parent
ARTIFACTS = ROOT / "artifacts"
WAIT = 120_000  # milliseconds, for anything that a kernel does
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # Outputs that scroll out of sight would otherwise leave the page, and a test could not read them.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}


class Lab:
    """A running JupyterLab over a copy of some notebooks."""

    def __init__(self, url: str, token: str, directory: Path):
        self.url, self.token, self.directory = url, token, directory

    def add(self, notebook: Path) -> str:
        shutil.copy(notebook, self.directory)
        return notebook.name


@contextmanager
def running(home: Path, directory: Path | None = None) -> Iterator[Lab]:
    """Start a server of `directory`, by default one under `home`; stop it afterwards, with its kernels."""
    directory = directory or home / "notebooks"
    directory.mkdir(parents=True, exist_ok=True)
    names = ["JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR",
             "JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR"]  # fmt: skip
    env = os.environ | {name: str(home / name.lower()) for name in names}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    for plugin, settings in SETTINGS.items():
        path = Path(env["JUPYTERLAB_SETTINGS_DIR"], plugin + ".jupyterlab-settings")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser",
               "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0",
               f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={directory}"]  # fmt: skip
    log = (home / "server.log").open("w")
    server = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        _await_server(server, f"{url}/api/status?token={token}", home / "server.log")
        yield Lab(url, token, directory)
    finally:
        server.terminate()  # JupyterLab stops its kernels on the way out
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()
        log.close()


def _await_server(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and server.poll() is None:
        with suppress(OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


class Notebook:
    """One notebook open on a page.

    Attributes
    ----------
    strays : list of str
        URLs off the loopback that the page asked for; all were aborted.
    """

    def __init__(self, context: BrowserContext, lab: Lab, name: str, *, width: int = 1280, height: int = 900):
        self.strays: list[str] = []
        self.page: Page = context.new_page()
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.set_default_timeout(WAIT)
        self.page.route("**/*", self._gate)
        self.page.goto(f"{lab.url}/lab/tree/{name}?token={lab.token}&reset")
        self.page.wait_for_function("window.jupyterapp?.shell?.currentWidget?.sessionContext")
        # Idle in the toolbar may mean "no kernel yet", and Run All is then dropped in silence.
        self._run("""async () => {
            const app = window.jupyterapp;
            await app.restored;
            const context = app.shell.currentWidget.sessionContext;
            await context.ready;
            await context.session.kernel.info;
            app.shell.collapseLeft();
        }""")

    def _run(self, script: str, argument: Any = None) -> Any:
        """Evaluate an async function on the page, but not for ever: Playwright itself sets no limit."""
        late = f"new Promise((_, no) => setTimeout(() => no(new Error('not done in {WAIT} ms')), {WAIT}))"
        return self.page.evaluate(f"argument => Promise.race([({script})(argument), {late}])", argument)

    def _gate(self, route: Route) -> None:
        parts = urlsplit(route.request.url)
        if parts.scheme in ("data", "blob") or parts.hostname in ("127.0.0.1", "localhost"):
            route.continue_()
        else:
            self.strays.append(route.request.url)
            route.abort()

    def command(self, name: str, **args: Any) -> None:
        """Run a JupyterLab command and wait for it to end."""
        self._run("([name, args]) => window.jupyterapp.commands.execute(name, args).then(() => null)",
                  [name, args])  # fmt: skip

    def run_all(self) -> float:
        """Run all cells, wait until they are done, and return how long it took, in seconds."""
        start = time.monotonic()
        self.command("notebook:run-all-cells")
        self.idle()
        return time.monotonic() - start

    def idle(self, quiet_ms: int = 250) -> None:
        """Wait until the kernel has been idle for a while: a debounced callback starts late."""
        self._run("""async (quiet) => {
            const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
            let since = performance.now();
            while (performance.now() - since < quiet) {
                await new Promise(done => setTimeout(done, 20));
                if (kernel.status !== 'idle') since = performance.now();
            }
        }""", quiet_ms)  # fmt: skip

    def errors(self) -> list[str]:
        """Names and messages of all errors in the outputs, and of widgets that failed to show."""
        stored = self.page.evaluate("""() => window.jupyterapp.shell.currentWidget.content.widgets
            .filter(cell => cell.model.type === 'code')
            .flatMap(cell => cell.model.outputs.toJSON())
            .filter(output => output.output_type === 'error')
            .map(output => output.ename + ': ' + output.evalue)""")
        failed = self.page.get_by_text(
            re.compile("Error displaying widget|Failed to load model|JavaScript Error")
        )
        return stored + failed.all_inner_texts()

    def restart(self) -> None:
        """Restart the kernel, as the menu does, without the dialog."""
        self._run("""async () => {
            const context = window.jupyterapp.shell.currentWidget.sessionContext;
            await context.session.kernel.restart();
            await context.session.kernel.info;
        }""")
        self.idle()

    def theme(self, dark: bool) -> None:
        self.command("apputils:change-theme", theme="JupyterLab Dark" if dark else "JupyterLab Light")
        self.page.wait_for_function("dark => document.body.dataset.jpThemeLight === String(!dark)", arg=dark)

    def cell(self, number: int) -> Locator:
        """The n-th cell of the notebook, counted from 0, markdown included."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(number)

    def picture(self, nth: int = 0) -> "Live":
        """The n-th explorer's picture."""
        place = self.page.locator(".toolkit-picture").nth(nth)
        self.page.wait_for_function(
            "n => document.querySelectorAll('.toolkit-picture')[n]?.dataset.drawn", arg=nth
        )
        return Live(self, place)

    def control(self, label: str, nth: int = 0) -> Locator:
        """The control with this accessible name: what a screen reader says."""
        return self.page.locator(".jp-OutputArea").get_by_label(label, exact=True).nth(nth)

    def shot(self, name: str, *, at: Locator | None = None) -> Path:
        """A screenshot of what is in view, into artifacts/."""
        if at is not None:
            at.scroll_into_view_if_needed()
            self.page.wait_for_timeout(150)
        path = ARTIFACTS / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        self.page.screenshot(path=path)
        return path

    def pages(self, name: str) -> list[Path]:
        """Screenshots from the top of the notebook to its end, a screenful each."""
        box = self.page.locator(".jp-WindowedPanel-outer").first
        box.evaluate("box => box.scrollTo(0, 0)")
        out: list[Path] = []
        while True:
            self.page.wait_for_timeout(200)
            out.append(self.shot(f"{name}_{len(out):02d}"))
            moved = box.evaluate("""box => { const y = box.scrollTop; box.scrollBy(0, box.clientHeight - 60);
                                             return box.scrollTop > y; }""")
            if not moved or len(out) > 40:
                return out


class Live:
    """An explorer's picture on the page: what it shows, and how fast it follows its controls."""

    def __init__(self, notebook: Notebook, place: Locator):
        self.notebook, self.place = notebook, place

    def figures(self) -> list[str]:
        """The aria-labels of all marks, in drawing order."""
        return self.place.evaluate("""el => [...el.querySelectorAll('[role=graphics-symbol][aria-label]')]
            .filter(mark => !/axis|legend|title|cap/.test(mark.getAttribute('aria-roledescription')))
            .map(mark => mark.getAttribute('aria-label'))""")

    def words(self) -> str:
        """The picture's text alternative."""
        return self.place.locator("svg").first.get_attribute("aria-label") or ""

    def after(self, action: Any) -> float:
        """Do something to a control; milliseconds from its first event to the next redraw."""
        self.place.evaluate("""el => {
            const watch = window.toolkitWatch = {};
            const begin = () => { watch.start ??= performance.now(); };
            for (const kind of ['keydown', 'pointerdown', 'input', 'change'])
                document.addEventListener(kind, begin, {capture: true, once: true});
            watch.done = new Promise(done => new MutationObserver((_, self) => {
                if (watch.start === undefined) return;
                self.disconnect();
                requestAnimationFrame(() => done(performance.now() - watch.start));
            }).observe(el, {attributes: true, attributeFilter: ['data-drawn']}));
        }""")
        action()
        spent = self.place.evaluate("""() => Promise.race([
            window.toolkitWatch.done, new Promise(done => setTimeout(() => done(-1), 10000))])""")
        if spent < 0:
            raise AssertionError("no redraw within 10 s")
        self.notebook.idle()
        return float(spent)
