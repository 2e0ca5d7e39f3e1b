"""Reads a YAML file for a handler, constructing nothing but plain data."""

from __future__ import annotations

from typing import Any


def get_yaml_config(yaml_file_path: str) -> Any:
    """The document of that file; None for an empty one. Raises OSError or yaml.YAMLError."""
    import yaml

    with open(yaml_file_path, encoding="utf-8") as file:
        return yaml.safe_load(file)
