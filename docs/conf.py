"""Sphinx: the site of the documentation. `make docs` builds it.

Its sources are where they are read without it: the root of the repository is Sphinx's,
so that links between files work here and there. See `generate.py` for what is made.
"""

import re
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import generate

project = "jaxscale"
copyright = "2026, the authors of jaxscale"
release = version = metadata.version("jaxscale")
extensions = ["myst_nb"]
root_doc = "docs/index"
include_patterns = ["docs/**", "colabs/*.ipynb", "*.md"]
exclude_patterns = ["README.md", "AGENTS.md"]

myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 4
# Here alone notebooks are executed, in CI too: one that fails is an error.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_execution_timeout = 300  # seconds that a cell may take, on a busy machine
nb_merge_streams = True
nb_output_stderr = "remove"
# Two packages have a `Layout`: types in signatures are linked to one of them.
suppress_warnings = ["ref.python"]

smartquotes = False  # they would make one dash of an option's two
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
  """Fills in what is generated, and names languages of code."""
  text = generate.fill(source[0])
  if not docname.startswith("colabs/"):
    text = re.sub(r"^```python notebook$", "```python", text, flags=re.MULTILINE)
  source[0] = text


def setup(app):
  """Sphinx calls it."""
  app.connect("source-read", prepare)
