"""Facts of a Python file: its models, its imports, the files it names, what it says to LitServe."""

from __future__ import annotations

import textwrap

import pytest

from marserve.archive.writing.python_source import Found, PythonSource, choose, read_python, snake_case
from marserve.errors import CannotArchive


def read(text: str) -> PythonSource:
    """The facts of `m.py` with this text."""
    return read_python(textwrap.dedent(text), "m.py")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def handle(data, context:\n", "m.py, line 1: '(' was never closed."),
        ("x = 1\0", "m.py"),
        ("(" * 5000 + ")" * 5000, "m.py"),
    ],
)
def test_a_file_that_is_no_python_is_refused_with_its_line(text: str, sentence: str) -> None:
    """Nothing of the file is run."""
    with pytest.raises(CannotArchive) as refusal:
        read_python(text, "m.py")

    assert sentence in refusal.value.message


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ("from marserve_handlers import model\n@model\nclass A: ...", True),
        ("import marserve_handlers as mh\n@mh.model()\ndef f(x): ...", True),
        ("from marserve_handlers import *\n@model\nclass A: ...", True),
        ("from marserve_handlers import model as m\nclass N: ...\nA = m(inputs={})(N)", True),
        (
            "from marserve_handlers import model\nif True:\n  mark = model(name='x')\n  @mark\n  class A: ...",
            True,
        ),
        ("from marserve_handlers import model, Tensor\nclass A: ...", False),
        ("from marserve_handlers.base import BaseHandler\nclass A(BaseHandler):\n  def f(self): self.model(1)", False),
        ("def model(x): ...\n@model\nclass A: ...", False),
    ],
)
def test_a_file_that_marks_a_model_is_recognised(text: str, marks: bool) -> None:
    """By what the names stand for, not by how they are written."""
    assert read(text).marks_a_model is marks


def test_a_file_without_a_model_is_refused() -> None:
    """The sentence says what a model would be."""
    with pytest.raises(CannotArchive, match=r"m\.py has no model: no class or function with @model"):
        choose(read("from marserve import __version__\nclass Net: pass\n"), None)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from marserve import Tensor, model\n@model\ndef m(x): ...", ("Tensor", "model")),
        ("from marserve import __version__, model\n@model\ndef m(x): ...", ("model",)),
        ("from marserve import *\n@model\ndef m(x): ...", ("Tensor", "model")),
        ("import marserve\n@marserve.model\ndef m(x): ...", ("Tensor", "model")),
    ],
)
def test_an_import_from_the_servers_package_is_set_right(text: str, names: tuple[str, ...]) -> None:
    """The natural guess, which no model is found by."""
    with pytest.raises(CannotArchive) as refusal:
        choose(read(text), None)

    assert refusal.value.message == (
        f"m.py, line 1: marserve has no {' or '.join(names)}: import them from marserve_handlers: from "
        f"marserve_handlers import {', '.join(names)}."
    )


def test_a_file_with_two_models_names_both() -> None:
    """And how to choose one."""
    source = read(
        """
        from marserve_handlers import model
        @model()
        class A: ...
        @model()
        def b(item): ...
        """
    )

    with pytest.raises(
        CannotArchive, match=r"m\.py has 2 models: A \(line 4\), b \(line 6\)\. Name one, as in m\.py:A\."
    ):
        choose(source, None)
    assert choose(source, "b").name == "b"


def test_an_unknown_object_is_refused_with_those_that_are_there() -> None:
    """Names that begin with an underscore are not offered."""
    source = read("class Net: pass\n_x = 1\ndef make(): pass\n")

    with pytest.raises(CannotArchive, match=r"m\.py has no Nett; it has Net, make\."):
        choose(source, "Nett")
    assert choose(source, "make") == Found("make", "handler", 3)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import marserve_handlers as mh\n@mh.model(name='d')\nclass D: ...\n", Found("D", "declared", 3, "d")),
        ("from marserve_handlers import model as m\n@m\nasync def f(x): ...\n", Found("f", "declared", 3)),
        ("from marserve_handlers import model\nclass N: ...\nD = model()(N)\n", Found("D", "declared", 3)),
        ("import litserve as ls\nclass L(ls.LitAPI): ...\n", Found("L", "litserve", 2)),
        ("from litserve import LitAPI\nclass B(LitAPI): ...\nclass C(B): ...\n", Found("C", "litserve", 3)),
        ("def handle(data, context): ...\nclass X: ...\n", Found("handle", "handler", 1, is_entry=True)),
        ("class X:\n def handle(self, data, context): ...\n", Found("X", "handler", 1, is_entry=True)),
        ("class N: ...\nclass X:\n def handle(self, data, context): ...\n", Found("X", "handler", 2)),
        (
            "from ts.torch_handler.base_handler import BaseHandler\nclass B(BaseHandler): ...\nclass X(B): ...\n",
            Found("X", "handler", 3),
        ),
        (
            "try:\n  import torch\nexcept ImportError:\n  torch = None\ndef handle(a, b): ...\n",
            Found("handle", "handler", 5, is_entry=True),
        ),
    ],
)
def test_each_shape_of_a_model_is_found(text: str, found: Found) -> None:
    """Declared, LitServe's, TorchServe's; by the names that imports give them."""
    assert choose(read(text), None) == found


def test_a_declared_model_comes_before_helpers_with_handle() -> None:
    """The clearest shape counts."""
    source = read(
        """
        from marserve_handlers import model
        class Helper:
            def handle(self, data, context): ...
        @model()
        class D: ...
        """
    )

    assert choose(source, None).name == "D"


def test_of_several_lit_apis_the_served_one_counts() -> None:
    """By the first argument of LitServer, through a variable too."""
    source = read(
        """
        import litserve as ls
        class A(ls.LitAPI): ...
        class B(ls.LitAPI): ...
        if __name__ == "__main__":
            api = B(max_batch_size=4, batch_timeout=0.01)
            server = ls.LitServer(api, workers_per_device=2, accelerator="cpu", timeout=len("x"))
            server.run(port=8000)
        """
    )

    assert choose(source, None).name == "B"
    assert source.lit_options.api == {"max_batch_size": 4, "batch_timeout": 0.01}
    assert source.lit_options.server == {"workers_per_device": 2, "accelerator": "cpu"}


def test_imports_say_whether_they_may_fail() -> None:
    """Those of `if __name__ == "__main__":` do not count; a worker never runs them."""
    source = read(
        """
        import torch
        from . import net
        from .sub.deep import thing
        try:
            import fast
        except ImportError:
            fast = None
        def f():
            import late
        if __name__ == "__main__":
            import argparse
        """
    )

    told = [(each.module, each.level, each.may_fail) for each in source.imports]
    assert told == [("torch", 0, False), ("", 1, False), ("sub.deep", 1, False), ("fast", 0, True), ("late", 0, True)]


def test_names_of_files_are_put_together() -> None:
    """`/`, `join` and plain texts; what leads elsewhere is left out."""
    source = read(
        """
        HERE = Path(__file__).parent
        a = HERE / "data" / "words.json"
        b = os.path.join(here, "net", "w.pt")
        c = open("./plain.txt")
        d = open("/etc/passwd"), open("../up.txt"), "two\\nlines"
        """
    )

    assert {"data/words.json", "net/w.pt", "plain.txt"} <= set(source.file_names)
    assert not {"/etc/passwd", "../up.txt", "two\nlines"} & set(source.file_names)


@pytest.mark.parametrize(
    ("name", "snake"),
    [
        ("Digits", "digits"),
        ("DigitsNet", "digits_net"),
        ("MyLitAPI", "my_lit_api"),
        ("XMLReader2", "xml_reader2"),
        ("predict", "predict"),
    ],
)
def test_class_names_become_names_of_models(name: str, snake: str) -> None:
    """Words are divided where capitals begin."""
    assert snake_case(name) == snake
