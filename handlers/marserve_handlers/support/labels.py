"""Names of classes: reading `index_to_name.json`, and putting names to a model's probabilities. Knows no runtime."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)


def load_label_mapping(mapping_file_path: str | os.PathLike[str]) -> dict[str, str] | None:
    """Class number as text to label, or None, with a warning, where there is no such file.

    The file holds `{"0": "cat"}`, `{"0": ["n02123045", "cat"]}` (the last one counts), or
    `{"object_type_names": ["cat", …]}`. Anything else raises ValueError, which names the file.
    """
    path = os.fspath(mapping_file_path)
    if not os.path.isfile(path):
        logger.warning("%s is missing. Answers name classes by their numbers.", os.path.basename(path))
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return _read_labels(json.load(file))
    except (ValueError, RecursionError) as error:
        what = "it is not UTF-8" if isinstance(error, UnicodeError) else str(error)
        is_json = not isinstance(error, (json.JSONDecodeError, RecursionError, UnicodeError))
        raise ValueError(f"{os.path.basename(path)}{'' if is_json else ' is no JSON'}: {what}") from None


def _read_labels(document: object) -> dict[str, str]:
    if not isinstance(document, dict):
        raise ValueError('index->name JSON mapping should be in "class": "label" format.')
    names = document.get("object_type_names")
    if isinstance(names, list):
        return {str(index): _label(name) for index, name in enumerate(names)}
    return {str(index): _label(name) for index, name in document.items()}


def map_class_to_label(
    probs: Sequence[Sequence[float]],
    mapping: Mapping[str, str] | None = None,
    lbl_classes: Sequence[Sequence[int]] | None = None,
) -> list[dict[str, float]]:
    """One dict of label to probability for each row of `probs`, in the row's order.

    `lbl_classes` holds the class number behind each probability; without it they are 0, 1, 2 and so on. A class that
    `mapping` lacks, and every class without one, is named by its number. Raises TypeError for other types.
    """
    if not isinstance(probs, list):
        raise TypeError(f"probs is a {type(probs).__name__}; it must be a list of rows.")
    if mapping is not None and not isinstance(mapping, Mapping):
        raise TypeError(f"mapping is a {type(mapping).__name__}; it must be a dict or None.")
    if lbl_classes is not None and not isinstance(lbl_classes, list):
        raise TypeError(f"lbl_classes is a {type(lbl_classes).__name__}; it must be a list of rows or None.")
    names: Mapping[str, str] = mapping or {}
    rows = []
    for number, row in enumerate(probs):
        classes: Sequence[int] = range(len(row)) if lbl_classes is None else lbl_classes[number]
        rows.append({names.get(key := str(index), key): prob for index, prob in zip(classes, row, strict=False)})
    return rows


def _label(name: object) -> str:
    label = name[-1] if isinstance(name, list) and name else name
    if not isinstance(label, str):
        raise ValueError("labels in index->name mapping must be either str or List[str]")
    return label
