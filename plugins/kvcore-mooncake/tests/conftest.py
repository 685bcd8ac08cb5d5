"""What the tests of kvcore-mooncake share. Without Mooncake nothing here can run: each test is skipped, in one line that says how to
install it."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvcore_mooncake import native

from kvcore import BackendLoadError


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        native.load()
    except BackendLoadError as error:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=str(error)))
