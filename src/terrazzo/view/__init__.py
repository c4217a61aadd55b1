"""The viewer: checkpoints, differences, layouts, steps and runs as one page of HTML, which needs no network.

`terrazzo view` makes such pages from files; `page_of` from objects.
"""

from terrazzo.view.api import page_of
from terrazzo.view.page import Page
from terrazzo.view.server import Viewer

__all__ = ["Page", "Viewer", "page_of"]
