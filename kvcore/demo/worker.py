"""A process of the demo: one side, with its libraries kept off the network."""

from __future__ import annotations

import os

from kvcore.demo.messages import Settings
from kvcore.sides import Link
from kvcore.states import Side


def work(side: Side, settings: Settings, link: Link) -> None:
    """Run a side."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    link.progress("importing torch and transformers")
    from kvcore.demo import decode, prefill

    (prefill if side == "prefill" else decode).run(settings, link)
