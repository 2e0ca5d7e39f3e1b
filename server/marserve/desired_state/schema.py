"""The JSON Schema of a desired state, for editors and checkers: the rules of `document.py` that a schema can express.

`python -m marserve.desired_state.schema > docs/models.schema.json` writes the file that is published; a test compares.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from marserve.desired_state.document import FORMAT, POLICIES
from marserve.model_options import said_in
from marserve.registry.intake.effective_options import RUNTIMES
from marserve.registry.intake.registration import MOST_WORKERS

_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_WORKERS: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": MOST_WORKERS}
# A version's name is text; a number in YAML is taken as it is written.
_VERSION_NAME: dict[str, Any] = {"type": ["string", "number"]}


def _words(*words: str) -> dict[str, Any]:
    return {"enum": list(words)}


def _version() -> dict[str, Any]:
    keys: dict[str, Any] = {
        "url": {**_TEXT, "description": "The archive's name in the model store, or its address."},
        "sha256": {
            "type": "string",
            "pattern": "^(sha256:)?[0-9a-fA-F]{64}$",
            "description": "The digest that the archive must have.",
        },
        "handler": {**_TEXT, "description": "In place of the manifest's handler."},
        "runtime": {**_words(*RUNTIMES), "description": "In place of the manifest's runtime."},
        "workers": {**_WORKERS, "description": "minWorkers and maxWorkers at once."},
    }
    bounded = {"minWorkers": _WORKERS, "maxWorkers": _WORKERS}
    declarable = said_in("desired")
    keys |= {each.key: {**bounded.get(each.key, each.kind.schema), "description": each.help} for each in declarable}
    return {
        "oneOf": [
            {**_TEXT, "description": "The archive's name in the model store, or its address, and nothing else."},
            {
                "type": "object",
                "required": ["url"],
                "additionalProperties": False,
                "properties": keys,
                "not": {"required": ["workers"], "anyOf": [{"required": ["minWorkers"]}, {"required": ["maxWorkers"]}]},
            },
        ]
    }


def _model() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["versions"],
        "additionalProperties": False,
        "properties": {
            "versions": {
                "type": "object",
                "minProperties": 1,
                "additionalProperties": {"$ref": "#/$defs/version"},
                "description": "The versions, by the names that their archives give them.",
            },
            "default": {**_VERSION_NAME, "description": "The version that answers what names none."},
            "labels": {
                "type": "object",
                "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_.-]{0,62}$"},
                "additionalProperties": _VERSION_NAME,
                "description": "Further names of versions.",
            },
            "traffic": {
                "type": ["object", "null"],
                "required": ["weights"],
                "additionalProperties": False,
                "properties": {
                    "weights": {
                        "type": "object",
                        "minProperties": 1,
                        "additionalProperties": {"type": "number", "minimum": 0},
                    },
                    "sticky": {
                        "type": ["object", "null"],
                        "oneOf": [{"required": ["header"]}, {"required": ["cookie"]}],
                        "additionalProperties": False,
                        "properties": {"header": _TEXT, "cookie": _TEXT, "salt": {"type": "string"}},
                    },
                },
                "description": "Shares of the requests that name no version, as PUT /models/{model}/traffic takes it.",
            },
            "shadow": {
                "type": ["object", "null"],
                "required": ["version"],
                "properties": {"version": _VERSION_NAME},
                "description": "The version that a share of the requests is mirrored to.",
            },
            "newVersions": {"$ref": "#/$defs/newVersions"},
        },
    }


def schema() -> dict[str, Any]:
    """The schema, JSON Schema 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "marserve: desired state",
        "type": "object",
        "required": ["models"],
        "additionalProperties": False,
        "properties": {
            "format": {"const": FORMAT},
            "models": {"type": ["object", "null"], "additionalProperties": {"$ref": "#/$defs/model"}},
            "newVersions": {"type": "array", "items": {"$ref": "#/$defs/newVersions"}},
        },
        "$defs": {
            "model": _model(),
            "version": _version(),
            "newVersions": {
                "type": "object",
                "required": ["prefix"],
                "additionalProperties": False,
                "properties": {
                    "prefix": {**_TEXT, "description": "The address below which versions appear."},
                    "policy": {**_words(*POLICIES), "description": "What to do with a new one; load if not given."},
                },
            },
        },
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(schema(), indent=2) + "\n")
