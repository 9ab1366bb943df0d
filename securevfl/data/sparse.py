"""The few things that blocks need of `scipy.sparse`, which is loaded when the first sparse block is made.

It takes longer to load than all of numpy, and most data has none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def issparse(value: Any) -> bool:
    """True for a sparse array or matrix; there is none before its module has been loaded."""
    module = sys.modules.get("scipy.sparse")
    return module is not None and bool(module.issparse(value))


def csr_array(values: Any, **options: Any) -> Any:
    """`scipy.sparse.csr_array`."""
    from scipy import sparse

    return sparse.csr_array(values, **options)


def hstack(blocks: Sequence[Any], *, format: str) -> Any:  # noqa: A002 - scipy's own name
    """`scipy.sparse.hstack`."""
    from scipy import sparse

    return sparse.hstack(blocks, format=format)
