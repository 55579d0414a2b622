"""How Sphinx builds the documentation site: `make docs`, then open build/site/index.html.

The source directory is the repository, so that pages may link to README, CONTRIBUTING and the examples as they do on a forge.
"""

import importlib.metadata

project = "quire"
author = "the quire authors"
copyright = "the quire authors, Apache-2.0"  # noqa: A001 - Sphinx gives the name
release = importlib.metadata.version("quire")

extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["docs/**", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md"]
exclude_patterns = [".venv", "build", "src", "tests", "bench", "**/__pycache__", ".*"]
source_suffix = {".md": "markdown"}

myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
suppress_warnings = ["misc.highlighting_failure"]  # blocks show output and half programs, too

html_theme = "furo"
html_title = "quire"
html_extra_path = ["redirect"]  # index.html at the top leads to docs/index.html
html_copy_source = False
html_show_sphinx = False
