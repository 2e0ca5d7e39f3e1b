"""Which models the server loads when it starts, and the names they get. Pure: the caller lists the store."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from marserve.settings.values import LoadModels, ModelToLoad
from marserve.store.addresses.pinned_digest import split_digest


def models_to_load(load_models: LoadModels, store_names: Iterable[str]) -> list[ModelToLoad]:
    """The models that the setting names, in its order; `all` stands for `store_names`, sorted."""
    if load_models == "all":
        return [ModelToLoad(name) for name in sorted(store_names)]
    return [model for model in load_models if isinstance(model, ModelToLoad)]


def name_from_file(url: str) -> str:
    """The name of a start-up model that neither the setting nor its manifest names (contract 6.4).

    It is the file's name without folder and last extension; each character other than a letter, a digit or an
    underscore becomes an underscore. The query and the digest of an address are ignored.
    """
    if "://" in url:
        url = re.split(r"[?#]", url, maxsplit=1)[0]
    stem = PurePosixPath(split_digest(url)[0].rstrip("/")).stem
    return re.sub(r"[^A-Za-z0-9_]", "_", stem)
