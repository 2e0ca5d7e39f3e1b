"""Keeps OpenVINO and NNCF from reporting to their maker.

OpenVINO 2026.4 asks for Google Analytics as soon as it is imported, and NNCF 3.4 at each call. Both hold a missing file
of consent in the user's home for consent, and write an identity of the machine there. No environment variable of
OpenVINO stops it (`OPENVINO_TELEMETRY_DISABLE` is read by nothing), and `CI` would change other libraries, too. Both do
without the package that reports where it cannot be imported.
"""

from __future__ import annotations

import sys
from typing import Any

REPORTER = "openvino_telemetry"


def switch_telemetry_off() -> None:
    """Make the reporting package unavailable in this process. To be called before OpenVINO or NNCF is imported."""
    modules: dict[str, Any] = sys.modules  # typed without the None that import takes for "not there"
    modules[REPORTER] = None
