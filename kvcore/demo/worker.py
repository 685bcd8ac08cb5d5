"""A process of the demo: runs one side and reports to the driver, also when it fails."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import threading
import traceback
import warnings
from multiprocessing.connection import Connection, wait

from kvcore.demo.messages import Failed, Link, Settings, Side


def main(side: Side, settings: Settings, connection: Connection) -> None:
    """Entry point of the process; ends when the side is done, has failed, or the driver is gone."""
    threading.Thread(target=_end_with_driver, name="kvcore-demo-driver-watch", daemon=True).start()
    _quiet(settings.debug)
    link = Link(connection)
    try:
        link.progress("importing torch and transformers")
        from kvcore.demo import decode, prefill

        (prefill if side == "prefill" else decode).run(settings, link)
    except Exception as error:
        with contextlib.suppress(OSError):
            link.tell(Failed(" ".join(str(error).split()) or type(error).__name__, traceback.format_exc()))


def _end_with_driver() -> None:
    """The rooms of a worker without a driver are nobody's, whatever it is waiting for."""
    driver = multiprocessing.parent_process()
    if driver is not None:
        wait([driver.sentinel])
        os._exit(1)


def _quiet(debug: bool) -> None:
    """Nothing here needs the network, and stderr belongs to the driver."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    if debug:
        logging.basicConfig(level=logging.INFO, format="%(processName)s %(name)s %(levelname)s %(message)s")
        return
    logging.getLogger().addHandler(logging.NullHandler())
    warnings.simplefilter("ignore")
