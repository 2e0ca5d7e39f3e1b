"""The house's own rules: who imports whom, what a process never loads, what no file may hold.

These tests read the sources and start fresh interpreters; they know no feature.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "marserve": ROOT / "server" / "marserve",
    "marserve_handlers": ROOT / "handlers" / "marserve_handlers",
    "marserve_client": ROOT / "client" / "marserve_client",
}
THIS_FILE = Path(__file__).resolve()

HEAVY = ("torch", "onnxruntime", "numpy", "PIL", "safetensors")
WEB = ("fastapi", "starlette", "uvicorn", "prometheus_client", "pydantic", "httpx", "typer", "rich")


@functools.cache
def source_files() -> list[Path]:
    """Every Python file of the three packages."""
    return sorted(file for folder in PACKAGES.values() for file in folder.rglob("*.py"))


@functools.cache
def text_of(file: Path) -> str:
    """A file's text, with names as Python compares them."""
    return unicodedata.normalize("NFKC", file.read_text("utf-8"))


def files_with(words: re.Pattern[str]) -> list[Path]:
    """The source files in whose text one of the words stands; no other needs to be parsed for them."""
    return [file for file in source_files() if words.search(text_of(file))]


@functools.cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    """What the rules look at in a file, at whatever depth. Parsing takes long: ask for files with certain words."""
    looked_at = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Call)
    return tuple(node for node in ast.walk(ast.parse(text_of(file))) if isinstance(node, looked_at))


@functools.cache
def tracked_files() -> list[Path]:
    """Every file of the repository: what git tracks or would; without git, what lies in the house's folders."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: which files belong to the repository is not known")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [file for file in files if file.is_file()]


def relative(file: Path) -> str:
    """How a message names a file."""
    return file.relative_to(ROOT).as_posix()


def loaded_after(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after running the statement."""
    report = "import sys; print('\\n'.join(sorted({name.partition('.')[0] for name in sys.modules})))"
    paths = [str(folder.parent) for folder in PACKAGES.values()]
    script = f"import sys; sys.path[:0] = {paths!r}\n{statement}\n{report}"
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


@functools.cache
def loaded_by_a_server() -> set[str]:
    """What a server and the commands have loaded; a thread that an import starts fails it."""
    return loaded_after(
        "import threading, marserve.app.server, marserve.cli.command_list as cli; cli.build_commands(); "
        "assert threading.active_count() == 1, threading.enumerate()"
    )


# ---------------------------------------------------------------------------------------------------- the floors


def test_imports_run_downwards_only() -> None:
    """import-linter keeps every contract of pyproject.toml."""
    pytest.importorskip("importlinter", reason="import-linter belongs to the group `lint`; `make floors` installs it")

    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-logo",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stdout + run.stderr


def test_a_worker_loads_neither_the_web_nor_a_runtime() -> None:
    """The worker's loop costs milliseconds and a few megabytes before a model is loaded."""
    loaded = loaded_after("import marserve.worker.loop")

    assert not loaded & {*WEB, *HEAVY}
    assert "marserve_handlers" not in loaded or not loaded & set(HEAVY)


def test_a_starting_template_stays_small() -> None:
    """What a template imports before it is told what to load."""
    assert not loaded_after("import marserve.worker.template") & {*WEB, *HEAVY}


def test_the_server_process_loads_no_runtime_and_no_handler() -> None:
    """A crash in a model cannot reach the server, and it is ready before torch would be imported."""
    assert not loaded_by_a_server() & {"torch", "onnxruntime", "marserve_handlers"}


def test_a_start_prepares_no_models_of_fastapi() -> None:
    """An API description that is never asked for would cost each start a fifteenth of its time."""
    assert "pydantic_core" in loaded_after(
        "import marserve.app.server, fastapi.openapi.models as models; assert not models.OpenAPI.__pydantic_complete__"
    )


def test_the_client_loads_nothing_of_the_server_and_no_torch() -> None:
    """A program that only asks has httpx, and numpy where that is installed."""
    loaded = loaded_after("import marserve_client") - loaded_after("import asyncio, httpx, numpy")

    assert not loaded & {*HEAVY, *WEB, "marserve", "marserve_handlers", "msgspec"}


def test_the_client_has_the_syntax_of_its_oldest_python() -> None:
    """It says 3.10; the rules of ruff and mypy are the server's, which is newer."""
    assert client_project()["requires-python"] == ">=3.10"
    for file in source_files():
        if PACKAGES["marserve_client"] in file.parents:
            ast.parse(text_of(file), feature_version=(3, 10))


@pytest.mark.parametrize("module", ["marserve", "marserve_handlers"])
def test_the_packages_themselves_import_nothing_heavy(module: str) -> None:
    """A package's `__init__` is loaded by everyone who imports anything below it."""
    assert not loaded_after(f"import {module}") & {*WEB, *HEAVY}


def test_importing_a_module_has_no_effect() -> None:
    """Module level holds constants and definitions: no thread is started, nothing is printed."""
    assert "threading" in loaded_by_a_server()


# ------------------------------------------------------------------------------------------------- names and words


def test_every_module_says_what_it_is() -> None:
    """The first thing in a file is a docstring; only an empty `__init__` needs none."""
    begins = re.compile(r'(?:#.*\n|\s)*(?:r?"""|$)')

    assert not [relative(file) for file in source_files() if not begins.match(text_of(file))]


def test_no_file_is_without_a_subject() -> None:
    """A file is named for its subject, and these names are none; in `ts_compat` the names are TorchServe's."""
    nameless = {"utils", "util", "helpers", "helper", "common", "misc"}
    ours = [file for file in source_files() if "ts_compat" not in file.parts]

    assert not [relative(file) for file in ours if {file.stem, file.parent.name} & nameless]


def rooms() -> list[Path]:
    """The folders of the server's code, its own aside, those of what supports the handlers, and the client's."""
    server, handlers, client = PACKAGES.values()
    return sorted(
        {
            file.parent
            for file in source_files()
            if server in file.parent.parents or {handlers / "support", client} & {file.parent, *file.parent.parents}
        }
    )


def test_no_room_is_too_full() -> None:
    """A room has at most fifteen files of Python, `__init__` counted."""
    assert not [relative(room) for room in [PACKAGES["marserve"], *rooms()] if len(list(room.glob("*.py"))) > 15]


def test_each_room_says_what_is_in_it() -> None:
    """Each file of a room is named where its `__init__` says what the room is."""
    unsaid = [
        relative(file)
        for room in rooms()
        for file in room.glob("*.py")
        if not file.stem.startswith("__")
        and not re.search(
            rf"\b{file.stem}\b", ast.get_docstring(ast.parse((room / "__init__.py").read_text("utf-8"))) or ""
        )
    ]

    assert not unsaid


def unfound_names(file: Path) -> Iterator[str]:
    """Files and modules that the server's text names in backticks and that are not where it says.

    A file alone is beside the one that names it, or beside the rooms; a path begins there, or at the repository's root.
    `h.py` and `x.py` are files of authors.
    """
    server = PACKAGES["marserve"]
    rooms_there = {room.name for room in server.iterdir() if room.is_dir()}
    for name in re.findall(r"`((?:[\w.]+/)*\w+\.py)\b", text_of(file)):
        if name.rpartition("/")[2] not in ("h.py", "x.py") and not any(
            (place / name).exists() for place in (file.parent, server, ROOT)
        ):
            yield name
    for name in re.findall(r"`(?:marserve\.)?((?:[a-z_0-9]+\.)+[A-Z]\w*)", text_of(file)):
        parts = name.split(".")
        if parts[0] in rooms_there and not server.joinpath(*parts[:-1]).with_suffix(".py").exists():
            yield name


def test_files_and_classes_that_the_text_names_are_where_it_says() -> None:
    """A reader follows them, and they move with the rooms."""
    ours = (file for file in source_files() if PACKAGES["marserve"] in file.parents)

    assert not [f"{relative(file)}: {name}" for file in ours for name in unfound_names(file)]


def test_no_top_level_package_takes_a_users_name() -> None:
    """Archives own modules called `server` and `handlers`; those folders are therefore no packages."""
    assert not (ROOT / "server" / "__init__.py").exists()
    assert not (ROOT / "handlers" / "__init__.py").exists()
    assert not (ROOT / "client" / "__init__.py").exists()


def test_nothing_is_left_unfinished() -> None:
    """No source says that it is to be finished later, and none raises NotImplementedError but for abstract methods."""
    words = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b")

    assert not [relative(file) for file in source_files() if words.search(text_of(file))]


def test_no_file_names_a_place_of_one_machine() -> None:
    """What is tracked works on every machine: no home folder, no private folder, no package index."""
    places = re.compile(
        rb"/(?:root|home/[a-z]|Users/[a-z]|work)/|/tmp/[a-z]|file:///opt|\b(?:pypi\.org|pythonhosted|registry\.npmjs)"
    )
    found = [
        f"{relative(file)}: {match.group(0).decode()}"
        for file in tracked_files()
        if file != THIS_FILE and (match := places.search(file.read_bytes()))
    ]

    assert not found


def test_no_tracked_file_is_a_link_out_of_the_repository() -> None:
    """A clone alone is complete."""
    assert not [relative(file) for file in tracked_files() if ROOT not in file.resolve().parents]


# --------------------------------------------------------------------------------------------------- safe loading


UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_WORDS = re.compile(rf"\b(?:{'|'.join(UNSAFE_MODULES)})\b")
HARMLESS_NAMES = {"UnpicklingError", "PickleError"}


def unsafe_names(file: Path) -> Iterator[str]:
    """What a module takes from those that run code out of data, at whatever depth, exception classes aside."""
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in UNSAFE_MODULES and (alias.asname or alias.name != "pickle"):
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module in UNSAFE_MODULES:
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name not in HARMLESS_NAMES)
        elif isinstance(node, ast.Attribute) and dotted(node.value) == "pickle" and node.attr not in HARMLESS_NAMES:
            yield f"pickle.{node.attr}"
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in ("import_module", "needed"):
            named = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            if named in UNSAFE_MODULES:
                yield str(named)


def dotted(node: ast.expr) -> str:
    """`torch.load` of the expression that says so; empty for anything but names and attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def calls(file: Path) -> Iterator[tuple[ast.Call, str]]:
    """Every call and the dotted name that it calls."""
    for node in nodes_of(file):
        if isinstance(node, ast.Call):
            yield node, dotted(node.func)


def has_keyword(call: ast.Call, name: str, value: object) -> bool:
    """Whether the call says `name=value` with a literal."""
    return any(
        keyword.arg == name and isinstance(keyword.value, ast.Constant) and keyword.value.value is value
        for keyword in call.keywords
    )


def test_no_module_can_unpickle() -> None:
    """Neither server nor built-in handlers take what runs code out of data; `pickletools` only reads.

    One file opens pickles, of archives that the operator trusts. Another gives a model that a worker has loaded to a
    process of the worker's own, by a pipe.
    """
    names = ((file, name.partition(".")[0]) for file in files_with(UNSAFE_WORDS) for name in unsafe_names(file))
    found = sorted({f"{relative(file)}: {name}" for file, name in names})

    assert found == [
        "handlers/marserve_handlers/flops/apart.py: pickle",
        "handlers/marserve_handlers/ready/trusted_pickle.py: joblib",
    ]


def test_every_load_is_restricted_to_weights() -> None:
    """`torch.load` says `weights_only=True`, `numpy.load` never `allow_pickle=True`, YAML is loaded safely."""
    found = []
    for file in files_with(re.compile(r"\bload\b|allow_pickle|\b(?:unsafe|full)_load\b|\beval\b|\bexec\b")):
        for call, name in calls(file):
            is_open = (
                (name.endswith("torch.load") and not has_keyword(call, "weights_only", True))
                or has_keyword(call, "allow_pickle", True)
                or name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec")
            )
            if is_open:
                found.append(f"{relative(file)}, line {call.lineno}: {name}")

    assert not found


def test_the_server_runs_no_shell() -> None:
    """Nothing is ever started by a line of text."""
    found = []
    for file in files_with(re.compile(r"\b(?:shell|system|popen)\b")):
        for call, name in calls(file):
            if has_keyword(call, "shell", True) or name in ("os.system", "os.popen"):
                found.append(f"{relative(file)}, line {call.lineno}: {name}")

    assert not found


# ------------------------------------------------------------------------------------------------ the distribution


def project() -> dict[str, object]:
    """The `project` table of pyproject.toml."""
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"])


def client_project() -> dict[str, object]:
    """The `project` table of the client's pyproject.toml."""
    return dict(tomllib.loads((ROOT / "client" / "pyproject.toml").read_text("utf-8"))["project"])


def test_server_and_client_have_one_version() -> None:
    """`marserve` asks for the client of its own version: both are released together."""
    said = [
        re.search(r'^__version__ = "(.+)"$', (PACKAGES[name] / "__init__.py").read_text("utf-8"), re.MULTILINE)
        for name in ("marserve", "marserve_client")
    ]
    ours, client = (found[1] for found in said if found)

    assert client == ours
    dependencies = project()["dependencies"]
    assert isinstance(dependencies, list)
    assert f"marserve-client=={ours}" in dependencies


def test_the_version_is_said_once() -> None:
    """`marserve.__version__` is the version, and an installed marserve agrees."""
    text = (PACKAGES["marserve"] / "__init__.py").read_text("utf-8")
    version = re.search(r'^__version__ = "(\d+\.\d+\.\d+\w*)"$', text, re.MULTILINE)

    assert version
    try:
        installed = importlib.metadata.version("marserve")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("marserve runs from its sources here; it is not installed")
    assert installed == version.group(1)


def test_every_command_of_the_distribution_can_be_called() -> None:
    """Each console script names a function that exists."""
    scripts = project()["scripts"]
    assert isinstance(scripts, dict)
    assert set(scripts) >= {"marserve", "torchserve", "torch-model-archiver", "torch-workflow-archiver"}

    named = [target.split(":") for target in scripts.values()]
    loaded_after("\n".join(f"import {module}; assert callable({module}.{function})" for module, function in named))


def test_all_packages_say_that_they_are_typed() -> None:
    """A user's type checker believes our annotations."""
    assert all((folder / "py.typed").is_file() for folder in PACKAGES.values())


def test_every_direct_dependency_is_pinned() -> None:
    """`constraints.txt` has a version for each library that pyproject.toml names."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    asked = [
        *document["build-system"]["requires"],
        *document["project"]["dependencies"],
        *(line for lines in document["project"]["optional-dependencies"].values() for line in lines),
        *(line for lines in document["dependency-groups"].values() for line in lines),
    ]
    client = client_project()
    extras = client["optional-dependencies"]
    assert isinstance(client["dependencies"], list)
    assert isinstance(extras, dict)
    asked += [*client["dependencies"], *(line for lines in extras.values() for line in lines)]
    ours = {"marserve-ts", "marserve-client"}  # this repository's other wheels
    names = {canonical(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]) for line in asked} - ours
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {canonical(line.split("==")[0]) for line in lines if "==" in line and not line.startswith("#")}

    assert not names - pinned


def test_the_long_suite_installs_what_its_tests_skip_without() -> None:
    """Builds of OpenVINO, NNCF and torchao, and py-spy, are run by no other target."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["dependency-groups"]
    makefile = (ROOT / "Makefile").read_text("utf-8")

    recipe = re.search(r"^\$\(STAMPS\)/long:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)

    assert recipe
    assert re.search(r"\[(\w+,)*optimise(,\w+)*\]", recipe[1])
    assert "--group long" in recipe[1]
    assert {re.split(r"[>=]", line)[0] for line in groups["long"]} >= {"py-spy", "schemathesis"}


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_changelog_has_a_place_for_what_comes_next() -> None:
    """CHANGELOG.md keeps the form of Keep a Changelog."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")

    assert "## [Unreleased]" in text
    headings = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert headings <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_every_target_of_the_makefile_is_in_its_help() -> None:
    """`make help` says what each target is for."""
    text = (ROOT / "Makefile").read_text("utf-8")
    phony = set(re.findall(r"^\.PHONY: (.+)$", text, re.MULTILINE))
    explained = set(re.findall(r"^([a-z-]+):.*## .+$", text, re.MULTILINE))

    assert phony == explained


# ------------------------------------------------------------------------------------------------------ the documents


def documents() -> list[Path]:
    """Every Markdown file of the repository."""
    return [file for file in tracked_files() if file.suffix == ".md"]


def test_every_link_between_documents_leads_somewhere() -> None:
    """A relative link names a file or folder of the repository."""
    broken = [
        f"{relative(document)}: {target}"
        for document in documents()
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text("utf-8"))
        if "://" not in target and not target.startswith("mailto:") and not (document.parent / target).exists()
    ]

    assert not broken


def test_every_page_of_the_documentation_is_in_its_index() -> None:
    """Whoever begins at `docs/index.md` finds all of it."""
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    pages = {document.name for document in documents() if document.parent == ROOT / "docs"} - {"index.md"}

    assert {page for page in pages if f"]({page})" not in index} == set()


def test_the_architecture_page_names_what_is_there() -> None:
    """Where it says `pool/slots/slot.py: Life.kill`, that file defines those names; every module it names exists."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    missing = []
    for path, names in re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)(?:: ([A-Za-z_.]+))?`", text):
        file = PACKAGES["marserve"] / path if not path.startswith("tests/") else ROOT / path
        source = file.read_text("utf-8") if file.is_file() else ""
        missing += [
            f"{path}: {name}"
            for name in names.split(".")
            if not source or (name and not re.search(rf"^\s*(?:async )?(?:def|class) {name}\b", source, re.MULTILINE))
        ]

    assert not missing


def test_every_file_that_the_documents_name_exists() -> None:
    """Paths in backticks that begin with a folder of the house are paths of the house."""
    house = r"`((?:server|handlers|client|model_store|tests|examples|benchmarks|docs|\.ci)/[A-Za-z0-9_./-]+)`"
    missing = [
        f"{relative(document)}: {path}"
        for document in documents()
        for path in re.findall(house, document.read_text("utf-8"))
        if not (ROOT / path).exists()
    ]

    assert not missing
