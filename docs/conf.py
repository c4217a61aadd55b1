"""How Sphinx makes the site of these pages: `make site`.  Nothing is fetched, and whatever it warns of is an error."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

from terrazzo import __version__

project = "terrazzo"
author = "the authors of terrazzo"
version = release = __version__
html_title = f"terrazzo {__version__}"
html_theme = "furo"
html_show_copyright = False
html_show_sourcelink = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
nitpicky = True
# Headings are link targets by the names that a forge gives them.
myst_heading_anchors = 4

# ------------------------------------------------------------------ the reference, made of docstrings

autodoc_member_order = "groupwise"
autodoc_inherit_docstrings = False  # torch's are not ours
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False
default_role = "code"  # what stands between single backticks
# Types in signatures are links if the reference has them; most are torch's or Python's, which have pages elsewhere.
nitpick_ignore_regex = [("py:.*", ".*")]

_MARKUP = re.compile(r"(?<![\s*])\*|\*(?=\w)|(?<=\w)_(?=\W|$)|\|")


def as_rst(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Docstrings are written as Markdown: an indented block is code, and stars or bars in the text mean nothing."""
    written, before = list(lines), ""
    lines.clear()
    if what == "module":
        return  # the page says what it is for
    code = False
    for number, line in enumerate(written):
        after_blank = number > 0 and not written[number - 1].strip()
        if code and line.strip() and not line.startswith("    "):
            code = False
        if not code and after_blank and line.startswith("    ") and before and not before.startswith(" "):
            code = True
            lines += [".. code-block:: python", ""]
        is_example = line.lstrip().startswith((">>>", "..."))
        lines.append(line if code or is_example else _escaped(line))
        before = line if line.strip() else before


def _escaped(line: str) -> str:
    parts = re.split(r"(``.+?``|`[^`]+`)", line)
    for i, part in enumerate(parts):
        if i % 2:
            after = parts[i + 1][:1]
            parts[i] = "``" + part.strip("`") + "``" + ("\\ " if after.isalnum() else "")  # the plural's s
        else:
            parts[i] = _MARKUP.sub(lambda found: "\\" + found[0], part)
    return "".join(parts)


class LinkNames(SphinxPostTransform):
    """Code that is a name of the reference becomes a link to it: pages need no markup that a forge does not know."""

    default_priority = 5

    def run(self, **kwargs: Any) -> None:
        known = self.env.domains.python_domain.objects
        for node in list(self.document.findall(nodes.literal)):
            entry = known.get(node.astext().removesuffix("()"))
            if entry is None or isinstance(node.parent, nodes.reference | nodes.title):
                continue
            address = self.app.builder.get_relative_uri(self.env.docname, entry.docname) + "#" + entry.node_id
            link = nodes.reference("", "", internal=True, refuri=address)
            node.replace_self(link)
            link += node


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", as_rst, priority=400)  # before napoleon, which reads "Args:"
    app.add_post_transform(LinkNames)
