"""A linear model of two inputs; a canary's `fault` in its configuration is what is wrong with it."""

import json
import os
import time


def handle(data, context):
    """One answer a row."""
    if data is None:
        return None
    fault = (context.model_yaml_config or {}).get("fault", "none")
    rows = [row["body"] for row in data]
    return [answer(body if isinstance(body, list) else json.loads(bytes(body)), fault) for body in rows]


def answer(inputs, fault):
    """What the model says, or what its fault makes of it."""
    time.sleep(0.2 if fault == "slow" else 0.01)
    if fault == "dead":
        os._exit(3)
    if fault == "errors" and inputs[0] % 5 == 0:
        raise ValueError("this one is not answered")
    return {"y": 0.5 * inputs[0] - 1.25 * inputs[1] + (9.0 if fault == "wrong" else 2.0)}
