"""What MkDocs is told about these pages: they are written to be read on a code host, too."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """`` ```python ranks=4 `` says how the tests run a block; to a reader it is Python."""
    return re.sub(r"^```python [^\n]*$", "```python", markdown, flags=re.MULTILINE)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name classes as Sphinx does."""
    return re.sub(r":(?:class|meth|func|attr|mod):<code>", "<code>", html)
