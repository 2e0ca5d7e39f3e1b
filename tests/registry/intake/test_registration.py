"""What clients are told of registered and scaled versions."""

from __future__ import annotations

import pytest

from marserve.registry.intake.registration import Registered, Scaled


@pytest.mark.parametrize(
    ("outcome", "own"),
    [
        (Registered("m", "1.0", 1, "done"), "Model m version 1.0 is registered, with 1 worker"),
        (Registered("m", "1.0", 2, "done"), "Model m version 1.0 is registered, with 2 workers"),
        (Registered("m", "1.0", 0, "done", True), "Model m version 1.0 is registered; the first request starts its "),
        (Registered("m", "1.0", 0, "done"), "Model m version 1.0 is registered, without workers; scaling it starts"),
        (Registered("m", "1.0", 1, "begun"), "Model m version 1.0 is registered; its workers are being started"),
        (Scaled("m", None, 1, "done"), "Model m has 1 worker now"),
        (Scaled("m", "2.0", 0, "done"), "Model m version 2.0 has no workers now"),
        (Scaled("m", "2.0", 3, "partial"), "Model m version 2.0: some of its workers are still starting"),
    ],
)
def test_one_worker_is_no_plural(outcome: Registered | Scaled, own: str) -> None:
    """TorchServe's words stay where its answers are recorded."""
    assert outcome.own_message.startswith(own)
    assert outcome.message != outcome.own_message
