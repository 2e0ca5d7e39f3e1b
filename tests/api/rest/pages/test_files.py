"""Tests for the files of the pages: what they are, whose they are, and what their headers forbid."""

from __future__ import annotations

import json
import posixpath
import re
from hashlib import sha256
from pathlib import Path

import pytest

from marserve.api.rest.pages.files import DASHBOARD_FILES, FILES, HEADERS, POLICY, STATIC, has_etag, read_files

VENDORED = STATIC / "vendored"
MOST_BYTES = 100_000
MOST_BYTES_OF_DASHBOARD = 200_000
ALL = {**FILES, **DASHBOARD_FILES}
HTML = ("docs.html", "dashboard/dashboard.html")


def own_files() -> list[Path]:
    """Files of the pages that are ours."""
    return [file for folder in (STATIC, STATIC / "dashboard") for file in folder.iterdir() if file.is_file()]


def colours(scheme: str) -> dict[str, str]:
    """The named colours of a scheme; the dark one has those of the light one that it does not change."""
    light, dark = re.findall(r":root \{(.*?)\}", (STATIC / "app.css").read_text("utf-8"), re.DOTALL)
    chosen = light if scheme == "light" else light + dark
    return dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{3,6});", chosen))


def luminance(colour: str) -> float:
    """Relative luminance, by WCAG 2."""
    digits = colour[1:] if len(colour) == 7 else "".join(each * 2 for each in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_colour_schemes(scheme: str) -> None:
    """Each text stands out from what it stands on by 4.5 to 1 at least, as WCAG asks."""
    named = colours(scheme)
    grounds = ("ground", "surface", "sunken")
    pairs = [(text, on) for text in ("text", "muted", "accent", "good", "fair", "bad") for on in grounds]
    pairs += [(each, f"{each}-ground") for each in ("accent", "good", "fair", "bad")] + [("on-accent", "accent")]

    for text, on in pairs:
        light, dark = sorted((luminance(named[text]), luminance(named[on])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{text} on {on}"


def test_every_file_of_the_folder_is_served_but_licences_and_the_list() -> None:
    """And nothing else is."""
    served = {STATIC / name for name, _ in ALL.values()}
    apart = {VENDORED / "VENDORED.json", *VENDORED.glob("LICENSE-*.txt")}

    assert served == {file for file in STATIC.rglob("*") if file.is_file()} - apart


def test_the_page_is_small() -> None:
    """All its files together, uncompressed."""
    files = read_files()

    assert sum(len(files[path].content) for path in FILES) < MOST_BYTES


def test_the_first_view_of_the_dashboard_is_small() -> None:
    """All that its HTML names, uncompressed; further pages are read when they are gone to."""
    files = read_files()
    html = files["/dashboard"].content.decode()
    named = [f"/{address}" for address in re.findall(r'(?:src|href)="(docs/[^"]*)"', html)]

    assert sum(len(files[path].content) for path in ("/dashboard", *named)) < MOST_BYTES_OF_DASHBOARD
    for path in named:
        if path.endswith(".js"):
            folder = path.rpartition("/")[0]
            for address in re.findall(r'^import .* from "([^"]*)"', files[path].content.decode(), re.MULTILINE):
                assert posixpath.normpath(f"{folder}/{address}") in named


def test_vendored_files_are_those_of_their_packages() -> None:
    """Byte for byte, with package, version and licence."""
    listed = json.loads((VENDORED / "VENDORED.json").read_text("utf-8"))

    assert set(listed) == {file.name for file in VENDORED.glob("*.*s")}
    for name, facts in listed.items():
        assert sha256((VENDORED / name).read_bytes()).hexdigest() == facts["sha256"]
        assert facts["package"]
        assert re.fullmatch(r"\d+\.\d+\.\d+", facts["version"])
        for licence in facts["licences"]:
            assert "Copyright" in (VENDORED / licence).read_text("utf-8")


def test_an_etag_follows_the_content(tmp_path: Path) -> None:
    """So that a browser with the files of another version gets the new ones."""
    (tmp_path / "vendored").mkdir()
    (tmp_path / "dashboard").mkdir()
    for name, _ in ALL.values():
        (tmp_path / name).write_bytes(b"other")

    here, there = read_files(), read_files(tmp_path)

    assert len({file.etag for file in here.values()}) == len(ALL)
    assert all(here[path].etag != there[path].etag for path in ALL)


@pytest.mark.parametrize("sent", ['"a"', 'W/"a"', '"b", "a"', "*"])
def test_a_browser_that_has_a_file_says_so(sent: str) -> None:
    """In each form of `If-None-Match`."""
    assert has_etag(sent, '"a"')


@pytest.mark.parametrize("sent", ["", '"b"', "a"])
def test_other_etags_do_not_match(sent: str) -> None:
    """The file is sent."""
    assert not has_etag(sent, '"a"')


def test_the_policy_allows_files_of_this_server_alone() -> None:
    """No inline code, no evaluated code, no outside address, no frame, no form that leads away."""
    directives = dict(each.split(" ", 1) for each in POLICY.split("; "))

    assert directives["default-src"] == "'none'"
    assert directives["script-src"] == directives["style-src"] == directives["connect-src"] == "'self'"
    assert directives["base-uri"] == directives["form-action"] == directives["frame-ancestors"] == "'none'"
    assert directives["require-trusted-types-for"] == "'script'"
    assert not re.search(r"unsafe|https?:|data:|\*", POLICY)
    assert HEADERS["x-content-type-options"] == "nosniff"


def test_the_page_has_no_inline_script_or_style_and_no_outside_address() -> None:
    """The policy would refuse them."""
    for name in HTML:
        page = (STATIC / name).read_text("utf-8")

        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon[a-z]+=|javascript:", page)
    for file in own_files():
        text = file.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://[a-z]|innerHTML|\beval\(|new Function", text), file.name


def test_the_page_s_own_addresses_are_relative() -> None:
    """So that it works behind a proxy that serves it below a path."""
    for name in HTML:
        page = (STATIC / name).read_text("utf-8")

        for address in re.findall(r'(?:src|href)="([^"]*)"', page):
            assert not address.startswith("/")
            assert f"/{address}" in ALL or address in ("openapi.json", "stats")
