"""Memory for the pages of a check or a measurement: of a kind that the backend moves, written and read as numpy arrays."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore import registry
from kvcore.memory import Indices
from kvcore.sides import ToolError

Bytes = npt.NDArray[np.uint8]

TORCH_DEVICES = {"cuda": "cuda", "rocm": "cuda", "npu": "npu"}
"""What torch calls a kind of memory."""


def memory_kinds(backend: str) -> frozenset[str]:
    """The kinds of memory that a backend moves. Imports the backend and raises what ``load_backend`` raises."""
    _, _, info = registry.plugin_manager(registry.load_backend(backend))
    return info.capabilities.memory


def random_pages(seed: int, pages: int, page_bytes: int) -> Bytes:
    """Bytes of shape ``[pages, page_bytes]``, the same wherever they are made, and unlike in every page."""
    made = bytearray(np.random.default_rng(seed).bytes(pages * page_bytes))
    return np.frombuffer(made, np.uint8).reshape(pages, page_bytes)


class Buffer:
    """Pages in one stretch of memory: ``tensor`` is a numpy array, or where the backend moves no CPU memory a torch tensor, of shape
    ``[pages, page_bytes]`` and bytes. Raises ``ToolError`` if there is no such memory here."""

    def __init__(self, kinds: frozenset[str], pages: int, page_bytes: int) -> None:
        self.tensor: Any = np.zeros((pages, page_bytes), np.uint8) if "cpu" in kinds else _on_device(sorted(kinds), pages, page_bytes)

    def write(self, content: Bytes) -> None:
        """Replace all bytes."""
        if isinstance(self.tensor, np.ndarray):
            self.tensor[:] = content
        else:
            self.tensor.copy_(importlib.import_module("torch").from_numpy(content))

    def put(self, pages: Indices, content: Bytes) -> None:
        """Replace the bytes of some pages."""
        if isinstance(self.tensor, np.ndarray):
            self.tensor[pages] = content
        else:
            torch = importlib.import_module("torch")
            self.tensor[torch.from_numpy(pages)] = torch.from_numpy(content).to(self.tensor.device)

    def take(self, pages: Indices) -> Bytes:
        """A copy of the bytes of some pages."""
        if isinstance(self.tensor, np.ndarray):
            return self.read()[pages]
        found: Bytes = self.tensor[importlib.import_module("torch").from_numpy(pages)].cpu().numpy()
        return found

    def clear(self) -> None:
        """Make all bytes zero."""
        self.tensor[:] = 0

    def read(self) -> Bytes:
        """All bytes; not a copy where they are in CPU memory."""
        found: Bytes = self.tensor if isinstance(self.tensor, np.ndarray) else self.tensor.cpu().numpy()
        return found


def _on_device(kinds: list[str], pages: int, page_bytes: int) -> Any:
    try:
        torch = importlib.import_module("torch")
        if "npu" in kinds:
            importlib.import_module("torch_npu")
        device = next(TORCH_DEVICES[kind] for kind in kinds if kind in TORCH_DEVICES)
        return torch.zeros((pages, page_bytes), dtype=torch.uint8, device=device)
    except Exception as error:  # a build of torch without the device raises what it likes
        why = " ".join(str(error).split()) or type(error).__name__
        raise ToolError(
            f"the backend moves {kinds} memory, and torch gives none here ({why:.200}); run this on a machine with it, with torch for it"
        ) from error
