"""nbval notices a dead kernel at once, instead of waiting for the cell's time-out (2,000 s by default)."""

import time
from queue import Empty
from typing import Any

from nbval.kernel import RunningKernel

_wait = RunningKernel.get_message


def _wait_while_alive(self: RunningKernel, stream: str, timeout: float | None = None) -> dict[str, Any]:
    end = float("inf") if timeout is None else time.monotonic() + timeout
    while True:
        left = end - time.monotonic()
        try:
            return _wait(self, stream, timeout=min(1.0, max(0.0, left)))
        except Empty:
            if not self.is_alive():
                raise RuntimeError("the kernel died in this cell") from None
            if left <= 1.0:
                raise


RunningKernel.get_message = _wait_while_alive
