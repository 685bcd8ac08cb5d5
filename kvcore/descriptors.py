"""Whether this process has file descriptors left, without which nobody new gets in: said once, with the limit, and when it is over."""

from __future__ import annotations

import errno
import logging
import os
import resource

from kvcore.logs import SparingLog

SHORT = (errno.EMFILE, errno.ENFILE)
SAY_EVERY_S = 30.0


class DescriptorWatch:
    """``look`` is called now and then with any open descriptor; ``log`` gets a line when there is none left, and one when there is."""

    def __init__(self, log: logging.Logger, every_s: float = SAY_EVERY_S) -> None:
        self._none, self._some = SparingLog(log, 1, every_s), SparingLog(log, 1, every_s)
        self.short = False
        """Whether there was none at the last look."""

    def look(self, descriptor: int) -> None:
        """See whether one more can be had."""
        try:
            os.close(os.dup(descriptor))
        except OSError as error:
            if error.errno not in SHORT or self.short:
                return
            self.short = True
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            self._none.say(
                logging.ERROR,
                f"no file descriptor is left ({error.strerror}; this process may have {most}): new connections wait, those there are "
                "go on; raise the limit (ulimit -n), or look for who holds connections open",
            )
            return
        if self.short:
            self.short = False
            self._some.say(logging.WARNING, "file descriptors are free again; new connections are served")
