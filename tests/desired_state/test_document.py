"""The document of a desired state: what it says, its one canonical form, and what is wrong with it, line by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from marserve.desired_state.document import LARGEST_DOCUMENT, DesiredState, NewVersions, read
from marserve.desired_state.schema import schema
from marserve.errors import BadDesiredState
from marserve.model_options import DECLARABLE

WHOLE = b"""
models:
  digits:
    versions:
      1.10: {url: digits.mar, workers: 2}
      "2.0":
        url: s3://models/digits-2.mar#sha256=AAAAaaaaAAAAaaaaAAAAaaaaAAAAaaaaAAAAaaaaAAAAaaaaAAAAaaaaAAAAaaaa
        minWorkers: 1
        maxWorkers: 4
        batchSize: 8
        samples: [{text: a}]
    default: 1.10
    labels: {stable: 1.10, canary: "2.0"}
    traffic: {weights: {1.10: 95, "2.0": 5}, sticky: {header: X-User}}
    shadow: {version: "2.0", share: 0.5}
    newVersions: {prefix: "s3://models/digits-", policy: canary}
  echo:
    versions: {"1.0": echo.mar}
newVersions: [{prefix: "s3://other/"}]
"""


def problems(text: str) -> list[str]:
    """What is wrong with a document."""
    with pytest.raises(BadDesiredState) as raised:
        read(text.encode())
    return raised.value.problems


def of_model(text: str) -> list[str]:
    """What is wrong with a document whose one model says this, each line at the depth of the model's keys."""
    lines = "".join(f"    {line}\n" for line in text.splitlines())
    return problems(f"models:\n  m:\n{lines}")


def test_a_document_says_models_versions_and_traffic() -> None:
    """Names of versions are what is written, not what YAML makes of a number."""
    state = read(WHOLE)

    digits = state.models["digits"]
    assert list(digits.versions) == ["1.10", "2.0"]
    assert digits.versions["1.10"].workers == (2, 2)
    assert digits.versions["2.0"].workers == (1, 4)
    assert digits.versions["2.0"].url == "s3://models/digits-2.mar"
    assert digits.versions["2.0"].source == f"s3://models/digits-2.mar#sha256={'a' * 64}"
    assert (digits.default, dict(digits.labels)) == ("1.10", {"stable": "1.10", "canary": "2.0"})
    assert digits.traffic == {"weights": {"1.10": 95, "2.0": 5}, "sticky": {"header": "X-User"}}
    assert digits.shadow is not None
    assert (digits.shadow["version"], digits.shadow["share"]) == ("2.0", 0.5)
    assert state.models["echo"].default == "1.0"
    assert state.models["echo"].versions["1.0"].workers is None
    assert state.policies() == [
        ("digits", NewVersions("s3://models/digits-", "canary")),
        (None, NewVersions("s3://other/", "load")),
    ]


def test_the_canonical_form_means_the_same_and_writes_the_same() -> None:
    """However the document was written; JSON is read as well."""
    state = read(WHOLE)

    again = read(state.write())
    as_json = read(json.dumps(state.document()).encode())

    assert again == state == as_json
    assert again.write() == state.write()
    assert again.digest == state.digest == as_json.digest


def test_the_order_of_keys_and_the_way_of_writing_do_not_change_the_digest() -> None:
    """`workers: 2` is both bounds, one bound alone is both, and the order of a map says nothing."""
    one = read(b"models: {b: {versions: {v: {workers: 2, url: b.mar}}}, a: {versions: {v: a.mar}}}")
    other = read(
        b"format: 1\nmodels:\n  a: {default: v, versions: {v: {url: a.mar}}}\n"
        b"  b: {versions: {v: {url: b.mar, maxWorkers: 2}}}\n"
    )

    assert one.digest == other.digest
    assert one.digest != read(b"models: {a: {versions: {v: a.mar}}}").digest


def test_no_models_is_a_state_too() -> None:
    """It must be said, though: an empty file is a slip."""
    assert read(b"models: {}") == read(b"models:") == DesiredState()

    assert problems("") == ["it says nothing; it must hold `models:`"]
    assert problems("newVersions: []") == ["line 1: models is missing; `models: {}` is a server without any"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vesions: {}", "line 3: vesions is no key of model m; did you mean versions?"),
        (
            "batch_size: 3",
            "line 3: batch_size is no key of model m; batchSize belongs to a version, below its versions",
        ),
        ("versions: {v: {url: m.mar, batch_size: 3}}", "line 3: batch_size is no key of version v of model m; did you"),
        ("versions:\n  v:\n    url: m.mar\n    zzz: 1", "line 6: zzz is no key of version v of model m"),
        ("versions: {}", "line 3: versions of model m is {}; it must be a map with a version or more"),
        ("default: v", "line 2: versions of model m is missing"),
        ("versions: {v: {workers: 1}}", "line 3: url of version v of model m is missing"),
        ("versions: {v: {url: [1]}}", "line 3: url of version v of model m is [1]; it must be text"),
        ("versions: {v: {url: m.mar, sha256: abc}}", "line 3: sha256 of version v of model m is abc; it must be 64"),
        ("versions: {v: {url: m.mar, runtime: LSP}}", "runtime of version v of model m is 'LSP'; it must be python"),
        ("versions: {v: {url: m.mar, batchSize: x}}", "batchSize of version v of model m is x; it must be a whole"),
        ("versions: {v: {url: m.mar, samples: 3}}", "samples of version v of model m is 3; it must be a list"),
        (
            "versions: {v: {url: m.mar, workers: -1}}",
            "workers of version v of model m is -1; it must be from 0 to 4096",
        ),
        ("versions: {v: {url: m.mar, workers: 1, minWorkers: 1}}", "stands beside minWorkers or maxWorkers"),
        ("versions: {v: {url: m.mar, minWorkers: 3, maxWorkers: 2}}", "is 2, which is less than its minWorkers, 3"),
        ("versions: {v: m.mar, w: m.mar}", "line 2: default of model m is missing: it has 2 versions"),
        (
            "versions: {v1: m.mar}\ndefault: v2",
            "default of model m is v2, which is not one of its versions; did",
        ),
        ("versions: {v: m.mar}\nlabels: {stable: w}", "line 4: the label stable of model m is w, which is not one of"),
        ("versions: {v: m.mar}\nlabels: {v: v}", "the label v of model m is the name of one of its versions"),
        ("versions: {v: m.mar}\nlabels: {9: v}", "line 4: '9' cannot be a label"),
        ("versions: {v: m.mar}\ntraffic: {weights: {w: 1}}", "line 4: a weight of model m is w, which is not one of"),
        ("versions: {v: m.mar}\ntraffic: {weights: {v: -1}}", "it must be a number from 0 to"),
        ("versions: {v: m.mar}\ntraffic: {weights: {v: 0}}", "The weights are all 0; one must be above it"),
        ("versions: {v: m.mar}\ntraffic: {sticky: {header: A}}", "traffic of model m: weights is None; it must name"),
        ("versions: {v: m.mar}\ntraffic: {weights: {v: 1}, sticky: {}}", "sticky must name either a header or"),
        ("versions: {v: m.mar}\ntraffic: {weights: {v: 1}, sticky: {header: 'a b'}}", "it must be a name of letters"),
        ("versions: {v: m.mar}\nshadow: {share: 1}", "shadow of model m must be a map that names its version"),
        ("versions: {v: m.mar}\nshadow: {version: v}", "the shadow of model m is v, which answers all its requests"),
        ("versions: {v: m.mar}\nshadow: {version: v, shar: 1}", "shadow of model m: A shadow has no member"),
        ("versions: {v: m.mar}\nnewVersions: {policy: load}", "prefix of newVersions of model m is missing"),
        ("versions: {v: m.mar}\nnewVersions: {prefix: a, policy: canari}", "is 'canari'; did you mean canary?"),
        ("versions: {v: m.mar}\nversions: {v: m.mar}", "versions stands twice in one map"),
        ("versions: {all: m.mar}", "'all' is no name of a version"),
        ('versions: {"..": m.mar}', "'..' is no name of a version"),
        ('versions: {"1\\u202e": m.mar}', "'1\\u202e' is no name of a version"),
    ],
)
def test_what_cannot_be_meant_is_named_with_its_line(text: str, expected: str) -> None:
    """And with the nearest word that could be."""
    found = of_model(text)

    assert any(expected in sentence for sentence in found), found


def test_all_that_is_wrong_is_said_at_once() -> None:
    """Nobody mends a file line by line, one start after the other."""
    found = problems("models:\n  a: {vesions: {}}\n  b:\n    versions: {v: {url: b.mar, batchSize: x}}\nfoo: 1\n")

    assert len(found) == 4
    assert found[0].startswith("line 5: foo is no key of the document")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"models: [", "line 1: "),
        (b"models: !!python/object:os.system {}", "objects are not built"),
        (b"models: \xff\xfe", "this is no YAML"),
        (b"- a", "line 1: the document is ['a']; it must be a map"),
        (b"models: 3", "line 1: models is 3; it must be a map"),
        (b"? [a]\n: b\n", "a key must be a word"),
        (b"#" * (LARGEST_DOCUMENT + 1), "at most 1048576 are read"),
        (b"format: 2\nmodels: {}", "line 1: format is 2; this server reads format 1"),
        (b"models: {m: 3}", "line 1: model m is 3; it must be a map"),
        (b"models: {m: {versions: {v: 3}}}", "line 1: version v of model m is 3; it must be a map"),
    ],
)
def test_what_is_no_such_document_is_refused(data: bytes, expected: str) -> None:
    """As a whole, and never with anything but the one error."""
    with pytest.raises(BadDesiredState) as raised:
        read(data, "fleet.yaml")

    assert expected in raised.value.message
    assert raised.value.message.startswith("fleet.yaml is refused, and nothing was changed: ")


_WORDS = st.sampled_from(["models", "versions", "v", "m", "url", "default", "traffic", "weights", "labels", "workers"])


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner) | st.dictionaries(_WORDS, inner)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), _nested, max_leaves=20))
def test_any_yaml_is_read_or_refused(document: Any) -> None:
    """Nothing else comes of it, and what is read can be written and read again."""
    try:
        state = read(yaml.safe_dump(document).encode())
    except BadDesiredState:
        return
    assert read(state.write()) == state


def test_secrets_of_an_address_are_not_shown() -> None:
    """Presigned addresses carry them."""
    state = read(b"models: {m: {versions: {v: 'https://store/m.mar?signature=planted'}}}")

    assert state.models["m"].versions["v"].shown == "https://store/m.mar?…"

    weights = read(b"models: {m: {versions: {v: {url: m.mar, checkpoint: 'https://user:planted@store/w/'}}}}")

    version = weights.models["m"].versions["v"]
    assert version.shown == "m.mar, checkpoint https://store/w/"
    assert b"planted" not in weights.shown().write()
    assert version.config == {"checkpoint": "https://user:planted@store/w/"}


def test_the_schema_knows_every_key_of_a_version() -> None:
    """And says of each what it is for."""
    properties = schema()["$defs"]["version"]["oneOf"][1]["properties"]

    assert set(DECLARABLE) <= properties.keys()
    assert properties["checkpoint"]["type"] == "string"
    assert all(each["description"] for each in properties.values())


def test_the_published_schema_is_this_one() -> None:
    """`python -m marserve.desired_state.schema > docs/models.schema.json` writes it."""
    published = Path(__file__).parents[2] / "docs" / "models.schema.json"

    assert json.loads(published.read_text()) == schema()
