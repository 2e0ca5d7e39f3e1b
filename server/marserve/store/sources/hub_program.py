"""The program that asks a hub, in a process of its own: calls of huggingface_hub (extra `hf`) cannot be cancelled.

It reads one order, a line of JSON. The server then keeps standard input open as long as it waits; when that ends, so
does the program. It writes lines of JSON: `have` and `total` in bytes, and at last `path` and `commit`, or `trouble`
with its kind.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
import sys
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from marserve.optional import trouble

ARCHIVES = (".mar", ".tar.gz", ".tgz")
MANIFEST = "MAR-INF/MANIFEST.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")


class CannotImport(Exception):
    """The library cannot be used; the text says why."""


class TooLarge(Exception):
    """The files have more bytes than an archive may have."""


class Lacks(Exception):
    """No file fits this pattern, which the order needs."""


class IsArchive(Exception):
    """The repository has this archive at this commit, or is one, and the order wants none."""


def main() -> None:
    """Carry out one order."""
    say_to = sys.stdout
    sys.stdout = sys.stderr  # the library's prints must not mix with the messages
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        found: dict[str, Any] = fetch(order, say_to)
    except CannotImport as error:
        found = {"trouble": "ImportError", "what": str(error)}
    except Lacks as error:
        found = {"trouble": "Lacks", "what": str(error)}
    except IsArchive as error:
        found = {"trouble": "IsArchive", "what": error.args[0], "commit": error.args[1]}
    except Exception as error:
        # Only the types: texts quote addresses, and headers of requests.
        answer = getattr(error, "response", None)
        kinds = [kind.__name__ for kind in type(error).__mro__]
        found = {"trouble": type(error).__name__, "kinds": kinds, "status": getattr(answer, "status_code", None)}
    _say(say_to, found)
    say_to.flush()
    os._exit(0)  # without waiting for the library's threads


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


def _say(to: TextIO, what: dict[str, Any]) -> None:
    to.write(json.dumps(what) + "\n")
    to.flush()


def fetch(order: dict[str, Any], say_to: TextIO) -> dict[str, Any]:
    """Fetch a repository's snapshot, the only archive in it, or the named file; returns its path and commit."""
    try:
        import httpx2
        import huggingface_hub as hub
        from huggingface_hub import constants, errors
        from huggingface_hub.hf_api import RepoFile
    except Exception as error:  # a broken installation may raise anything
        raise CannotImport(trouble("hf", error)) from None

    repository, revision, file = order["repository"], order["revision"], order["file"]

    def of_cache() -> dict[str, Any]:
        return _of_cache(repository, revision, file, order)

    if constants.HF_HUB_OFFLINE:
        return of_cache()
    api = hub.HfApi()
    try:
        commit = revision if _COMMIT.fullmatch(revision) else api.model_info(repository, revision=revision).sha
        if _COMMIT.fullmatch(revision):
            with contextlib.suppress(Exception):  # if the cache has all of it, the hub is not asked
                return of_cache()
        sizes = {
            entry.path: entry.size
            for entry in api.list_repo_tree(repository, recursive=True, revision=commit)
            if isinstance(entry, RepoFile)
        }
    except errors.HfHubHTTPError as error:
        if error.response is not None and error.response.status_code < 500:
            raise
        return of_cache()  # the hub is down; the cache may have it
    except (OSError, httpx2.TransportError):
        return of_cache()
    assert commit is not None
    file = file or _only_archive(sizes)
    _check_wanted(sizes, file, commit, order)
    chosen, selection = ([file], {}) if file else _selected(sizes, order)
    total = sum(sizes.get(each, 0) for each in chosen)
    if total > order["max_bytes"]:
        raise TooLarge
    progress = _progress(say_to, total)
    if file:
        path = hub.hf_hub_download(repository, file, revision=commit, tqdm_class=progress)
    else:
        path = hub.snapshot_download(repository, revision=commit, tqdm_class=progress, **selection)
    if revision != commit:
        _remember(Path(path), repository, revision, commit)
    return {"path": path, "commit": commit}


def _only_archive(files: Any) -> str | None:
    """The only archive of a repository; None if there are several, or the repository is a model folder itself."""
    archives = [file for file in files if file.lower().endswith(ARCHIVES)]
    return archives[0] if MANIFEST not in files and len(archives) == 1 else None


def _check_wanted(files: Collection[str], archive: str | None, commit: str, order: Mapping[str, Any]) -> None:
    """Raise IsArchive if a repository of these files, with this only archive, is one and the order wants none."""
    if not order.get("archives", True) and (archive is not None or MANIFEST in files):
        raise IsArchive(archive or MANIFEST, commit)


def select(files: Iterable[str], names: Sequence[str], but: Sequence[str]) -> list[str]:
    """The files that one of `names` fits and none of `but`, shell patterns as the library reads them."""
    return [
        file
        for file in files
        if any(fnmatch.fnmatch(file, one) for one in names) and not any(fnmatch.fnmatch(file, one) for one in but)
    ]


def _selected(files: Collection[str], order: Mapping[str, Any]) -> tuple[Collection[str], dict[str, Any]]:
    """The files to fetch of a repository that has these, and the library's arguments for them. Raises Lacks."""
    if MANIFEST in files or "names" not in order:
        return files, {}
    chosen = select(files, order["names"], order["but"])
    for pattern in order["needs"]:
        if not fnmatch.filter(chosen, pattern):
            raise Lacks(pattern)
    return chosen, {"allow_patterns": order["names"], "ignore_patterns": order["but"]}


def _of_cache(repository: str, revision: str, file: str | None, order: Mapping[str, Any]) -> dict[str, Any]:
    """The cached files, if complete, without asking the hub. Raises the library's errors otherwise."""
    import huggingface_hub as hub
    from huggingface_hub import constants

    files: list[str] = []
    if file is None:
        here = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
        with contextlib.suppress(OSError):
            name = revision if _COMMIT.fullmatch(revision) else (here / "refs" / revision).read_text().strip()
            folder = here / "snapshots" / name
            files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
            file = _only_archive(files)
            _check_wanted(files, file, name, order)
    if file is not None:
        path = Path(hub.hf_hub_download(repository, file, revision=revision, local_files_only=True))
        inner = len(Path(file).parts)
        return {"path": str(path), "commit": path.parents[inner - 1].name}
    selection = _selected(files, order)[1] if files else {}
    path = Path(hub.snapshot_download(repository, revision=revision, local_files_only=True, **selection))
    return {"path": str(path), "commit": path.name}


def _remember(path: Path, repository: str, revision: str, commit: str) -> None:
    """Note in the cache the commit of a branch, so that it is found without the hub."""
    for parent in path.parents:
        if parent.name == f"models--{repository.replace('/', '--')}":
            with contextlib.suppress(OSError):
                note = parent / "refs" / revision
                note.parent.mkdir(parents=True, exist_ok=True)
                new = note.with_name(f"{note.name}.{os.getpid()}")
                new.write_text(commit)
                new.replace(note)
            return


def _progress(say_to: TextIO, total: int) -> Any:
    """A progress bar that writes messages with bytes instead of drawing."""
    from tqdm.auto import tqdm

    lock = threading.Lock()
    have = 0

    class Progress(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("name", None)
            self._counts = options.get("unit") == "B" and not str(options.get("desc")).startswith("Downloading bytes")
            options["file"] = sys.stderr
            options["disable"] = True
            super().__init__(*arguments, **options)

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal have
            if self._counts and n:
                with lock:
                    have += int(n)
                    _say(say_to, {"have": min(have, total), "total": total})
            return None

    return Progress


if __name__ == "__main__":
    main()
