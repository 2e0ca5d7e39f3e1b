"""Opens a pickle, which can run any code, of an archive that the operator trusts (`trusted_models`), and no other."""

from __future__ import annotations

import os
from typing import Any

from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.ready.packages import needed


def load_trusted(path: str, context: Any, handler: str, instead: str) -> Any:
    """What joblib or pickle wrote. Raises ModelNotLoadable unless the operator trusts the archive.

    `instead` names the form that needs no trust.
    """
    if getattr(context, "is_trusted", False) is not True:
        raise ModelNotLoadable(
            f"{os.path.basename(path)} is a pickle, which can run any code: save the model as {instead}, or have the "
            "operator name the archive in trusted_models."
        )
    return needed("joblib", handler, "joblib").load(path)
