"""Settings from Vertex AI's variables: the port and routes that it calls, and the model's files. Pure.

`AIP_HEALTH_ROUTE` and `AIP_PREDICT_ROUTE` are keys' own variables (`table.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from marserve.errors import BadSettings

PORT, STORAGE = "AIP_HTTP_PORT", "AIP_STORAGE_URI"
VARIABLES = (PORT, STORAGE)

# The names of the archive and the model in Vertex AI's own images for PyTorch.
ARCHIVE, MODEL = "model.mar", "model"


def vertex_settings(environment: Mapping[str, str], given: Collection[str]) -> dict[str, tuple[str, str]]:
    """Keys with their text and the variable that it comes from, without keys in `given`, which the operator set.

    `allowed_urls` and `model_roots` are always included, to be added behind the operator's. Raises BadSettings for
    invalid variables.
    """
    said: dict[str, tuple[str, str]] = {}
    port = environment.get(PORT, "").strip()
    if port and "inference_address" not in given:
        if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65535:
            raise BadSettings(
                f"{PORT} is {port!r}, and inference_address is made of it; it must be a whole number from 1 to 65534",
                key="inference_address",
                source=PORT,
            )
        said["inference_address"] = (f"http://0.0.0.0:{port}", PORT)
    storage = environment.get(STORAGE, "").strip().rstrip("/")
    if not storage:
        return said
    if not re.fullmatch(r"gs://[^/,?#\s]+(/[^,?#\s]+)?|(/[^/,?#\s]+)+", storage):
        raise BadSettings(
            f"{STORAGE} is {storage!r}, and load_models is made of it; it must be gs://bucket/folder, or a folder of "
            "this machine",
            key="load_models",
            source=STORAGE,
        )
    if storage.startswith("/"):
        said["model_roots"] = (storage, STORAGE)
    else:
        said["allowed_urls"] = (f"{re.escape(storage)}/.*", STORAGE)
    if not {"load_models", "model_snapshot", "desired_state"} & set(given):
        said["load_models"] = (f"{MODEL}={storage}/{ARCHIVE}", STORAGE)
    return said
