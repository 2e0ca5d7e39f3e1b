"""What describe can tell of archives on their way, before there is a version to be described."""

from __future__ import annotations

import pytest

from marserve.registry.intake.pending_fetches import Coming, model_of
from marserve.store.fetching.download_list import DownloadList


def test_an_archive_on_its_way_tells_how_far_it_is() -> None:
    """Waiting for its turn, downloading, unpacking; then nothing is told any more."""
    coming, downloads = Coming(), DownloadList()

    with coming.awaiting("http://a/m.mar?key=secret", "m", "2.0") as awaited:
        [told] = coming.of("m")
        assert (told["url"], told["modelVersion"], told["state"]) == ("http://a/m.mar?…", "2.0", "waiting")
        assert "bytes" not in told
        with downloads.under_way("http://a/m.mar", "m.mar") as listed:
            awaited.begin(listed)
            assert coming.of("m")[0]["state"] == "waiting"
            listed.progress(5, 10)
            told = coming.of("m")[0]
            assert [told[key] for key in ("state", "download", "bytes", "size")] == ["downloading", listed.id, 5, 10]
        awaited.unpack()
        assert coming.of("m")[0]["state"] == "unpacking"

    assert coming.of("m") == []


def test_what_fails_is_not_on_its_way_any_more() -> None:
    """However it ends."""
    coming = Coming()

    with pytest.raises(OSError, match="cut"), coming.awaiting("http://a/m.mar", None, None):
        raise OSError("cut")

    assert coming.of("m") == []


def test_only_what_may_be_the_version_is_told_of_it() -> None:
    """An archive that nobody has looked into may be any."""
    coming = Coming()

    with (
        coming.awaiting("http://a/one.mar", "m", "1.0"),
        coming.awaiting("http://a/any.mar", "m", None),
        coming.awaiting("http://a/m.mar", "other", None),
    ):
        assert [told["url"] for told in coming.of("m")] == ["http://a/one.mar", "http://a/any.mar"]
        assert [told["url"] for told in coming.of("m", "2.0")] == ["http://a/any.mar"]


@pytest.mark.parametrize(
    ("url", "model"),
    [
        ("http://a/b/digits.mar?v=1", "digits"),
        ("s3://bucket/digits.tar.gz", "digits"),
        ("hf://org/digits@main", "digits"),
        ("https://a/digits.v2.mar", "digits.v2"),
    ],
)
def test_without_a_name_it_is_called_after_its_file(url: str, model: str) -> None:
    """As its manifest mostly does."""
    assert model_of(url) == model
