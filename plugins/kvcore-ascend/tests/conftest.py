"""What the tests of kvcore-ascend share. They run the real engine, on a host with an NPU or on the shims of ``plugins/shims``; without
either each test is skipped, in one line that says how to install it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvcore_ascend import native

from kvcore import BackendLoadError

SHIMS = "plugins/shims/README.md says how to build the shims and set their environment"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        native.load()
        lacks = "" if os.environ.get("ASCEND_HOME_PATH") else f"no CANN (ASCEND_HOME_PATH is not set); {SHIMS}"
    except BackendLoadError as error:
        lacks = str(error)
    for item in items:
        if lacks and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=lacks))
