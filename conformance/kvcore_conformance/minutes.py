"""How long a soak may be told to take, by the command and by pytest."""

from __future__ import annotations

import argparse

MOST_MINUTES = 10_000


def minutes(text: str) -> float:
    """Of a soak, as the command line has them."""
    try:
        if 0 <= (found := float(text)) <= MOST_MINUTES:
            return found
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes from 0 to {MOST_MINUTES}")
