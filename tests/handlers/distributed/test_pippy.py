"""What of PiPPy's handlers works, and what says that it cannot."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from marserve_handlers.distributed.pippy import BasePippyHandler, get_pipeline_driver, initialize_rpc_workers
from marserve_handlers.errors import ModelNotLoadable
from support.model_context import make_context


class Own(BasePippyHandler):
    """An author's."""


def test_the_driver_says_what_to_use_instead() -> None:
    """`torch.distributed.pipelining`."""
    with pytest.raises(ModelNotLoadable, match=r"torch\.distributed\.pipelining"):
        get_pipeline_driver(None, 2, None)


def test_outside_a_group_there_are_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says which keys make a group."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)

    with pytest.raises(ModelNotLoadable, match="set parallelType: pp and parallelLevel"):
        initialize_rpc_workers(0, 1, make_context())


@pytest.mark.torch
def test_a_handler_joins_the_rpc_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one: it can call itself."""
    torch: Any = pytest.importorskip("torch")
    if not torch.distributed.rpc.is_available():
        pytest.skip("this torch has no RPC")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    handler = Own()

    handler.initialize(make_context(config={"pippy": {"rpc_timeout": 20, "num_worker_threads": 4}}))
    try:
        assert torch.distributed.rpc.rpc_sync("worker0", max, args=(1, 2)) == 2
    finally:
        torch.distributed.rpc.shutdown()
    assert (handler.local_rank, handler.world_size) == (0, 1)
