"""View: tables into pictures (`charts`), pictures onto a page (`figure`), controls around them (`explorers`).

Importing this makes Altair show its charts without a network, unless another renderer was chosen.
"""

from .figure import Figure, enable, show

__all__ = ["Figure", "enable", "show"]

enable()
