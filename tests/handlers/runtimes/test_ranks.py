"""The device of a rank."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from marserve_handlers.runtimes.ranks import device_of_rank  # noqa: E402

pytestmark = pytest.mark.torch


def test_ranks_go_round_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are on the CPU where there are none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(device_of_rank(rank)) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert str(device_of_rank(1)) == "cpu"
