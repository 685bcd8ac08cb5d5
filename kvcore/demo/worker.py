"""A process of the demo: runs one side and reports to the driver, also when it fails."""

from __future__ import annotations

import logging
import os
import signal
import traceback
import warnings
from multiprocessing.connection import Connection

from kvcore.demo.messages import DriverGone, Failed, Link, Settings, Side


def main(side: Side, settings: Settings, connection: Connection) -> None:
    """Entry point of the process; ends when the side is done, has failed, or the driver is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver gets it too, and ends its workers
    _quiet(settings.debug)
    try:
        _run(side, settings, Link(connection))
    except DriverGone:
        return


def _run(side: Side, settings: Settings, link: Link) -> None:
    link.progress("importing torch and transformers")
    try:
        from kvcore.demo import decode, prefill

        (prefill if side == "prefill" else decode).run(settings, link)
    except DriverGone:
        raise
    except Exception as error:
        link.tell(Failed(" ".join(str(error).split()) or type(error).__name__, traceback.format_exc()))


def _quiet(debug: bool) -> None:
    """Nothing here needs the network, and stderr belongs to the driver."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    if debug:
        logging.basicConfig(level=logging.INFO, format="%(processName)s %(name)s %(levelname)s %(message)s")
        return
    logging.getLogger().addHandler(logging.NullHandler())
    warnings.simplefilter("ignore")
