"""What the tests of kvcore-mori share. Without mori, or what it needs of the host (on a host without RDMA and ROCm: plugins/shims), nothing
here can run: each test is skipped, in one line that says how to install it."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvcore_mori import native

from kvcore import BackendLoadError

SHIMS = 'or run on the test shims: eval "$(python plugins/shims/environment.py mori OUT)", see plugins/shims/README.md'


def missing() -> str:
    """What is, with what to do about it; "" if nothing."""
    try:
        native.load()
    except BackendLoadError as error:
        return f"{error}; {SHIMS}"
    return "".join(f"{one.name}: {one.value}; {one.advice}; {SHIMS}" for one in native.needs() if one.advice)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if why := missing():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=why))
