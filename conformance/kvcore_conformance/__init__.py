"""The conformance kit of kvcore: holds any backend to the transfer contract, by name, from its entry point.

``kvcore-conformance --backend NAME`` runs all of it. A test file of a backend that needs code to be set up imports the suite and
overrides a fixture::

    from kvcore_conformance.suite import *


    @pytest.fixture(scope="session")
    def kvcore_subject():
        return Subject("mine", options={"port": start_my_daemon()})
"""

from kvcore_conformance.subject import Subject

__all__ = ["Subject", "__version__"]
__version__ = "0.1.0"
