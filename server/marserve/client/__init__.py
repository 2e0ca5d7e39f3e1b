"""The client of marserve under the server's name: all of `marserve_client`, which is a distribution of its own.

Programs that only ask a server install `marserve-client` and import `marserve_client`: it brings httpx alone.
"""

from marserve_client import *  # noqa: F403
from marserve_client import __all__ as __all__
