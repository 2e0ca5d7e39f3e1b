"""Functions of a graph that its handler file does not have are found without running it."""

from __future__ import annotations

import pytest

from marserve.workflows.functions import missing_functions


@pytest.mark.parametrize(
    "source",
    [
        "def pre(data, context): pass",
        "async def pre(data, context): pass",
        "from nodes import pre",
        "from nodes import other as pre",
        "pre = lambda data, context: data",
        "try:\n    import fast\n    def pre(): pass\nexcept ImportError:\n    pass",
        "if True:\n    from nodes import pre",
        "(pre, post) = make()",
    ],
)
def test_what_a_module_binds_is_there(source: str) -> None:
    """However it is bound, in a branch too."""
    assert missing_functions(["pre"], source.encode()) == []


@pytest.mark.parametrize(
    "source",
    ["", "def other(): pass", "class A:\n    def pre(self): pass", "def f():\n    pre = 1", "print(pre)", "# pre"],
)
def test_what_it_does_not_bind_is_missing(source: str) -> None:
    """A method or a local name is none of the module's."""
    assert missing_functions(["pre"], source.encode()) == ["pre"]


@pytest.mark.parametrize(
    "source",
    [b"from nodes import *", b"def __getattr__(name): pass", b"globals()['pre'] = 1", b"def (", b"\0", b"(" * 5000],
)
def test_what_cannot_be_told_is_not_missed(source: bytes) -> None:
    """The server imports it, and tells."""
    assert missing_functions(["pre"], source) == []
