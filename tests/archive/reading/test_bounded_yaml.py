"""YAML from somebody else: plain data, and bounds on depth and expansion."""

from __future__ import annotations

import pytest
import yaml

from marserve.archive.reading.bounded_yaml import load_yaml
from marserve.errors import BadArchive


def test_keys_keep_the_order_of_the_file_and_those_that_stand_twice_are_told() -> None:
    """Workflows count on the order."""
    warnings: list[str] = []

    document = load_yaml(b"b: 1\na: {z: 1, y: 2}\nb: 3\n", "f.yaml", warnings)

    assert list(document) == ["b", "a"]
    assert list(document["a"]) == ["z", "y"]
    assert warnings == ["b stands in f.yaml more than once; the last one counts"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !!python/name:os.system", "holds the tag"),
        ("a: !own {}", "holds the tag"),
        ("a: &x [*x]", "contains itself"),
        ("[" * 100 + "]" * 100, "nested more than 64 deep"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"b{n}: &b{n} [*{'a' if not n else f'b{n - 1}'}]\n" for n in range(3)),
            "",
        ),
        (
            "a0: &a0 [1,1,1,1,1,1,1,1]\n"
            + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 8)),
            "expands to more than",
        ),
    ],
)
def test_what_would_build_objects_or_fill_the_memory_is_refused(text: str, message: str) -> None:
    """A few aliases are none of these."""
    if not message:
        load_yaml(text.encode(), "f.yaml", [])
        return
    with pytest.raises(BadArchive, match=message):
        load_yaml(text.encode(), "f.yaml", [])


def test_what_is_no_yaml_raises_the_readers_own_error() -> None:
    """Whoever reads the file says what that means."""
    with pytest.raises(yaml.YAMLError):
        load_yaml(b"a: [", "f.yaml", [])
