"""Sphinx configuration of the site; `make docs` builds it.

The source directory is the root of the repository, so that links between files work on the
site and on a code host. `generate.py` generates the reference pages.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import generate

import jaxscale

project = "jaxscale"
copyright = "2026, the authors of jaxscale"
release = version = jaxscale.__version__
extensions = ["myst_nb"]
root_doc = "docs/index"
include_patterns = ["docs/**", "colabs/*.ipynb", "*.md"]
exclude_patterns = ["README.md", "AGENTS.md"]

myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 4
# Show the notebooks with their committed outputs, as a code host does. A slow test executes them
# and compares (docs/notebooks.py --check).
nb_execution_mode = "off"
# Two packages export `Layout`, so links of types in signatures are ambiguous.
suppress_warnings = ["ref.python"]

smartquotes = False  # smart quotes would turn the -- of options into a dash
highlight_language = "text"
html_theme = "furo"
html_title = "jaxscale"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["static/index.html"]
html_show_sphinx = False
html_copy_source = False
pygments_style, pygments_dark_style = "friendly", "monokai"


def prepare(app, docname, source):
  """Insert generated parts and set the language of code blocks."""
  text = generate.fill(source[0])
  if not docname.startswith("colabs/"):
    text = re.sub(r"^```python notebook$", "```python", text, flags=re.MULTILINE)
  source[0] = text


def setup(app):
  """Register `prepare` with Sphinx."""
  app.connect("source-read", prepare)
