"""Which versions of Transformers the package runs with."""

from __future__ import annotations

import re
from importlib.util import find_spec

from .errors import KvtuneError


def require_transformers() -> None:
    """Tells of a version that the package does not run with, before a name that it lacks does."""
    found = "not installed"
    if find_spec("transformers") is not None:
        import transformers

        found = transformers.__version__
        numbers = re.match(r"(\d+)\.(\d+)", found)
        if numbers and (5, 3) <= tuple(map(int, numbers.groups())) < (6, 0):
            return
    raise KvtuneError(f"Transformers is {found}, expected 5.3 or newer, but not 6", 'run `pip install "transformers>=5.3,<6"`')
