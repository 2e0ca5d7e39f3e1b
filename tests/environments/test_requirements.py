"""Tests for reading an archive's requirements: what pip is given, what is refused, what makes two files differ."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import pytest

from marserve.environments.requirements import MAX_BYTES, MAX_LINES, Requirements, read_requirements
from marserve.errors import DependencyFailed
from support.wheels import write_wheel

SHA = "0" * 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An unpacked archive with a wheel, a folder of packages, and a secret beside it."""
    archive = tmp_path / "archive"
    (archive / "wheels").mkdir(parents=True)
    write_wheel(archive, "tiny")
    write_wheel(archive / "wheels", "other")
    (archive / "wheels" / "links.html").write_text('<a href="http://evil.test/other-9.0-py3-none-any.whl">x</a>')
    (archive / "source").mkdir()
    (archive / "source" / "pyproject.toml").write_text("[project]\nname='s'\nversion='1'\n")
    (archive / "handler.py").touch()
    (tmp_path / "outside.whl").write_bytes(b"secret")
    return archive


def read(folder: Path, text: str, *allowed: str) -> Requirements:
    """The requirements of an archive whose file says this."""
    (folder / "requirements.txt").write_text(text)
    return read_requirements(folder, "requirements.txt", allowed)


def lines(requirements: Requirements) -> list[str]:
    """What pip is given."""
    return [entry.render(lambda path: Path("/placed") / path.name) for entry in requirements.entries]


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("numpy", "numpy"),
        ("numpy>=1.20,<3", "numpy>=1.20,<3"),
        ("Torch == 2.0.*  # the newest", "Torch== 2.0.*"),
        ("a-b.c_d[x,y]~=1.0", "a-b.c_d[x,y]~=1.0"),
        ('tomli; python_version < "3.11"', 'tomli ; python_version < "3.11"'),
        ("pkg (>=1)", "pkg(>=1)"),
        (f"pkg==1 --hash=sha256:{SHA}", f"pkg==1 --hash=sha256:{SHA}"),
        (
            f"pkg==1 \\\n  --hash=sha256:{SHA} \\\n  --hash sha256:{SHA}",
            f"pkg==1 --hash=sha256:{SHA} --hash=sha256:{SHA}",
        ),
        ("./tiny-1.0-py3-none-any.whl", "file:///placed/tiny-1.0-py3-none-any.whl"),
        ("tiny-1.0-py3-none-any.whl", "file:///placed/tiny-1.0-py3-none-any.whl"),
        ("file:tiny-1.0-py3-none-any.whl", "file:///placed/tiny-1.0-py3-none-any.whl"),
        ("wheels/other-1.0-py3-none-any.whl", "file:///placed/other-1.0-py3-none-any.whl"),
        ("wheels/../tiny-1.0-py3-none-any.whl", "file:///placed/tiny-1.0-py3-none-any.whl"),
        ("./tiny-1.0-py3-none-any.whl[x]", "/placed/tiny-1.0-py3-none-any.whl[x]"),
        ("tiny @ ./tiny-1.0-py3-none-any.whl", "tiny @ file:///placed/tiny-1.0-py3-none-any.whl"),
        ("tiny[x]@file:tiny-1.0-py3-none-any.whl", "tiny[x] @ file:///placed/tiny-1.0-py3-none-any.whl"),
        ("./source", "file:///placed/source"),
        ("-e ./source", "file:///placed/source"),
        ("--no-index", "--no-index"),
        ("--pre", "--pre"),
        ("--only-binary :all:", "--only-binary :all:"),
        ("--no-binary=pkg,other", "--no-binary pkg,other"),
    ],
)
def test_what_is_understood_is_given_to_pip_in_our_own_words(folder: Path, line: str, given: str) -> None:
    """Named requirements, files and folders of the archive, harmless options."""
    assert lines(read(folder, f"\n# a comment\n{line}\n")) == [given]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        *(
            (line, "lies outside")
            for line in ("../outside.whl", "./wheels/../../outside.whl", "-e ../", "./linked.whl")
        ),
        *((line, "inside of the archive") for line in ("/etc/passwd", "file:///etc/passwd", "~/x.whl", "a\\b.whl/x")),
        *(
            (line, "inside of the archive")
            for line in ("tiny @ file:///etc/x.whl", "--find-links /etc", "-r /etc/passwd")
        ),
        *((line, "the archive holds no") for line in ("./gone.whl", "gone-1.0.zip", "-r gone.txt", "-c gone.txt")),
        *((line, "lies outside") for line in ("-r ../outside.whl", "-c ../outside.whl", "--find-links ..", "-f..")),
        *((line, "the option --") for line in ("--target /x", "--target=/x", "--trusted-host x", "--user")),
        *((line, "the option --") for line in ("--prefix=/x", "--root /x", "--global-option=x", "--use-feature y")),
        *((line, "the option --") for line in ("--proxy=http://x", "--cert x", "--ind http://x", "--no-index --log x")),
        *((line, "the option -") for line in ("-t /x", "-v", "-", "--", "--no-index=1")),
        *(
            (line, "matches none of allowed_urls")
            for line in ("--index-url http://evil.test/simple", "-ihttp://evil.test")
        ),
        *(
            (line, "matches none of allowed_urls")
            for line in ("--extra-index-url=https://evil.test", "-f http://evil.test")
        ),
        *((line, "matches none of allowed_urls") for line in ("http://evil.test/x.whl", "git+https://evil.test/x.git")),
        *(
            (line, "matches none of allowed_urls")
            for line in ("x @ https://evil.test/x.whl", "-e git+https://evil.test/x")
        ),
        *((line, "matches none of allowed_urls") for line in ("--index-url http://a.test", "-f http://a")),
        *((line, "variables") for line in ("--index-url https://${TOKEN}@a.test/simple", "pkg==${VERSION}")),
        *(
            (line, "of a requirement is not allowed")
            for line in ("pkg --target=/x", "pkg --config-settings x=y", "pkg -t")
        ),
        *((line, "is no requirement") for line in ("pkg $(id)", "pkg | id", "=1", "pkg==1:2")),
        *((line, "is no requirement") for line in ("pkg>=one", "pkg[", "pkg 1.0")),
        *((line, "is no environment marker") for line in ("pkg ; os_nme == 'nt'", "pkg ; ", "pkg ; os_name == 'nt")),
        *((line, "is neither a package") for line in ("./handler.py", "tiny @ handler.py")),
        ("pkg ; os_name == `id`", "is no environment marker"),
        ("--find-links 'x", "quotation mark"),
        ("-e tiny", "names no folder of the archive"),
        ("--find-links handler.py", "is no folder of the archive"),
    ],
)
def test_what_leads_elsewhere_is_refused_with_its_line(folder: Path, line: str, word: str) -> None:
    """The archive is not trusted: its requirements are for its own files and for the operator's index."""
    (folder / "linked.whl").symlink_to(folder.parent / "outside.whl")

    with pytest.raises(DependencyFailed, match=rf"^requirements\.txt, line 2: .*{re.escape(word)}"):
        read(folder, f"numpy\n{line}\n", "https://allowed.test/.*")


def test_a_requirement_is_given_to_pip_as_it_was_written(folder: Path) -> None:
    """Extras, versions and markers in any form that pip reads. The text stays, and with it the digests of caches."""
    written = ["pkg[a, b](>=1,<2)", "pkg~=1.4.2 ; python_version < '4' and (os_name == \"posix\" or extra == 'x')"]

    assert lines(read(folder, "\n".join(written))) == written


def test_addresses_that_the_operator_allows_are_given_to_pip(folder: Path) -> None:
    """By the whole address; anything more is another address."""
    indexes = "--index-url https://a.test/simple\n--extra-index-url https://a.test/more\n"

    given = lines(read(folder, f"{indexes}x @ https://a.test/x.whl ; os_name == 'nt'\n", r"https://a\.test/.*"))

    assert given == [
        "--index-url https://a.test/simple",
        "--extra-index-url https://a.test/more",
        "x @ https://a.test/x.whl ; os_name == 'nt'",
    ]
    with pytest.raises(DependencyFailed):
        read(folder, "--index-url https://a.test/simple/more\n", r"https://a\.test/simple")
    assert lines(read(folder, "git+https://a.test/x.git@1\n", "https://a.test/.*")) == ["git+https://a.test/x.git@1"]


@pytest.mark.parametrize(
    "address",
    [
        *(
            "https://a.test@evil.test/simple",
            "https://a.test:x@evil.test/",
            "https://a.test\\@evil.test/x",
            "file:///etc",
        ),
        *("ssh://a.test/x", "git+ssh://git@a.test/x", "svn+https://a.test/x", "https://", "https:///x", "simple"),
        *(
            "https://a.test/\u00e9",
            "https://a.t%65st/x",
            "https://[::1]/x",
            "ftp://a.test/x",
            "https://a.test\t.evil.test/",
        ),
    ],
)
def test_an_address_that_two_could_read_in_two_ways_is_not_matched_at_all(folder: Path, address: str) -> None:
    """Not even by a pattern that matches everything."""
    with pytest.raises(DependencyFailed, match=r"is not one that could be allowed|option|is no requirement"):
        read(folder, f"--index-url {address}\n", ".*")


def test_files_that_a_file_names_are_read_in_its_place(folder: Path) -> None:
    """Relative to the file that names them; constraints are kept apart."""
    (folder / "more").mkdir()
    (folder / "more" / "one.txt").write_text("-r two.txt\none\n-c pins.txt\n")
    (folder / "more" / "two.txt").write_text("two\n")
    (folder / "more" / "pins.txt").write_text("two==2\n")

    requirements = read(folder, "zero\n-r more/one.txt\n")

    assert lines(requirements) == ["zero", "two", "one"]
    assert [entry.text for entry in requirements.constraints] == ["two==2"]


def test_a_folder_of_links_gives_its_packages_and_no_pages(folder: Path) -> None:
    """A page of links in it would lead pip to any address."""
    requirements = read(folder, "--no-index --find-links wheels\nother\n")

    assert [path.name for path in requirements.links] == ["other-1.0-py3-none-any.whl"]
    assert lines(requirements) == ["--no-index", "other"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("-r requirements.txt\n", "is named by files that it names"),
        ("x\n" * (MAX_LINES + 1), "lines"),
        ("#" * (MAX_BYTES + 1), "bytes"),
    ],
)
def test_files_that_never_end_are_refused(folder: Path, text: str, word: str) -> None:
    """Bounds on depth, lines and bytes."""
    with pytest.raises(DependencyFailed, match=word):
        read(folder, text)


def test_a_file_that_is_not_there_or_no_text_is_refused(folder: Path) -> None:
    """With a sentence, not an accident."""
    (folder / "binary.txt").write_bytes(b"\xff\xfe\0")

    for file in ("gone.txt", "binary.txt", "wheels", "../outside.whl"):
        with pytest.raises(DependencyFailed, match=re.escape(file)):
            read_requirements(folder, file)


def test_the_digest_follows_what_is_installed_and_nothing_else(folder: Path) -> None:
    """Comments and the archive's place do not count; every byte of a package does."""
    text = "--find-links wheels\n./tiny-1.0-py3-none-any.whl\n./source\nother\n"
    first = read(folder, text).digest

    assert read(folder, f"# a comment\n{text}").digest == first
    moved = folder.parent / "moved"
    folder.rename(moved)
    assert read(moved, text).digest == first
    assert read(moved, text + "more\n").digest != first
    for changed in ("tiny-1.0-py3-none-any.whl", "wheels/other-1.0-py3-none-any.whl", "source/pyproject.toml"):
        before = read(moved, text).digest
        with (moved / changed).open("ab") as file:
            file.write(b"x")
        assert read(moved, text).digest != before


def test_a_file_without_requirements_asks_for_nothing(folder: Path) -> None:
    """Options alone install nothing."""
    assert not read(folder, "# none\n--no-index\n").asks_for_something
    assert read(folder, "./tiny-1.0-py3-none-any.whl\n").asks_for_something
    assert read(folder, "numpy\n").asks_for_something


@pytest.mark.parametrize(
    "line",
    ["numpy" + " " * 100_000 + "scipy", " " * 100_000 + "x @", "[" * 100_000, "a[" + " ," * 50_000, "\\\n" * 50_000],
    ids=["a gap", "an indent", "brackets", "an open bracket", "continued"],
)
def test_a_line_without_end_costs_no_more_than_its_length(folder: Path, line: str) -> None:
    """Whoever reads it holds the interpreter's lock: a server would stand still for an hour."""
    began = time.thread_time()

    with contextlib.suppress(DependencyFailed):
        read(folder, line)

    assert time.thread_time() - began < 2.0
