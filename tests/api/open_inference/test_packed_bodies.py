"""Tests for compressed bodies of inference requests, as the server sees them."""

from __future__ import annotations

import pytest

from marserve.api.open_inference.packed_bodies import PackedBodies, encoding_of
from marserve.errors import ModelNotFound, UnknownEncoding
from marserve.messages import PACKED_BODY


class Models:
    """`m` declares its tensors, `plain` does not; `none` is not there."""

    def takes_tensors(self, model: str, version: str | None = None) -> bool:
        """Whether a model declares them."""
        if model == "none":
            raise ModelNotFound(model)
        return model == "m"


PACKED = PackedBodies(Models(), 1000)


@pytest.mark.parametrize(
    ("given", "known"),
    [("gzip", "gzip"), ("GZIP", "gzip"), ("x-gzip", "gzip"), ("deflate", "deflate"), ("Deflate", "deflate")],
)
def test_the_worker_is_given_the_encoding_and_the_limit(given: str, known: str) -> None:
    """In one header of the server's."""
    assert PACKED.header("m", None, given) == (PACKED_BODY, f"{known} 1000")


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "identity, gzip", "\u00e4" * 500])
def test_another_encoding_is_refused_by_name(encoding: str) -> None:
    """Two of them are another one. The name is cut."""
    with pytest.raises(UnknownEncoding, match="send it as gzip, as deflate, or as it is") as refused:
        PACKED.header("m", None, encoding)

    assert encoding[:10].encode("ascii", "backslashreplace").decode() in str(refused.value)
    assert len(str(refused.value)) < 500


def test_a_model_that_declares_no_tensors_takes_no_compressed_body() -> None:
    """Its handler gets bodies as they are, so parameters in them would be lost."""
    with pytest.raises(UnknownEncoding, match="the model 'plain' takes none, as it does not declare its tensors"):
        PACKED.header("plain", None, "gzip")
    with pytest.raises(ModelNotFound):
        PACKED.header("none", None, "gzip")


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([], None),
        ([(b"Content-Type", b"gzip")], None),
        ([(b"Content-Encoding", b" identity ")], None),
        ([(b"Content-Encoding", b"")], None),
        ([(b"Content-Encoding", b"gzip")], "gzip"),
        ([(b"content-encoding", b"gzip"), (b"CONTENT-ENCODING", b"deflate")], "gzip, deflate"),
    ],
)
def test_the_encoding_is_read_from_all_lines_of_the_header(lines: list[tuple[bytes, bytes]], found: str | None) -> None:
    """In any spelling of its name."""
    assert encoding_of(lines) == found
