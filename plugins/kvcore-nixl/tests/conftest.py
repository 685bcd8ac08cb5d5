"""What the tests of kvcore-nixl share. Without NIXL nothing here can run: each test is skipped, in one line that says how to install it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from kvcore_nixl import native

from kvcore import BackendLoadError


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    native.prepare_environment({}, logging.getLogger(__name__))
    try:
        native.load()
    except BackendLoadError as error:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=str(error)))


@pytest.fixture(params=["tcp", "shm"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Over TCP a write stays in flight until the other side takes it in; over shared memory it is a copy within the post."""
    if request.param == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    else:
        monkeypatch.delenv("UCX_TLS", raising=False)
    return str(request.param)


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything goes over TCP."""
    monkeypatch.setenv("UCX_TLS", "tcp")
