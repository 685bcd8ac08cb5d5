"""In the place of torch where that is not installed: mori imports it, and does not use it for memory given by address."""

from __future__ import annotations


class Tensor:
    """Nothing is one."""
