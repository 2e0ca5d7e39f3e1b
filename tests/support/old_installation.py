"""A TorchServe user's folder for tests of the migration, with problems planted in it, each at a place that is known."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

from support.archives import manifest, zip_of

CONFIG = """\
inference_address=http://127.0.0.1:8080
management_address=http://127.0.0.1:8081
metrics_address=http://127.0.0.1:8082
model_store=/home/model-server/model-store
defualt_workers_per_model=2
job_queue_size=many
private_key_file=/etc/gone/server.key
number_of_netty_threads=32
disable_token_authorization=true
"""

START = """\
#!/bin/sh
# torchserve --not-a-command
export TS_NO_SUCH_SETTING=1
pip install torchserve==0.12.0 torch-model-archiver
torchserve --start --foreground \\
    --ts-config config.properties --model-stor ./model-store \\
    --log-config log4j2.xml
"""

DOCKERFILE = """\
FROM pytorch/torchserve:0.12.0-cpu
RUN apt-get install -y openjdk-17-jdk
COPY model-store /home/model-server/model-store
"""


IMPORTS = b"""\
import os
import no_such_package.part

try:
    import also_missing
except ImportError:
    also_missing = None

def handle(data, context):
    return data
"""

NAMES = b"""\
from ts.torch_handler.base_handler import BaseHandler
from ts.nowhere.at_all import Thing

class H(BaseHandler):
    pass
"""


class _Deadly:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("run",))


def make_archives(store: Path) -> None:
    """Archives with one problem each, and one without."""
    store.mkdir(parents=True)
    good = {
        "h.py": b"import json\n\ndef handle(data, context):\n    return data\n",
        "MAR-INF/MANIFEST.json": manifest("good"),
    }
    (store / "good.mar").write_bytes(zip_of(good))
    (store / "imports.mar").write_bytes(
        zip_of(
            {
                "h.py": IMPORTS,
                "MAR-INF/MANIFEST.json": manifest("imports"),
            }
        )
    )
    (store / "names.mar").write_bytes(
        zip_of(
            {
                "h.py": NAMES,
                "MAR-INF/MANIFEST.json": manifest("names"),
            }
        )
    )
    (store / "yaml.mar").write_bytes(
        zip_of(
            {
                "h.py": good["h.py"],
                "model-config.yaml": b"minWorkers: 1\nbatchSize: many\n",
                "MAR-INF/MANIFEST.json": manifest("yaml", configFile="model-config.yaml"),
            }
        )
    )
    (store / "nohandler.mar").write_bytes(
        zip_of({"README": b"lost", "MAR-INF/MANIFEST.json": manifest("nohandler", handler="lost.py")})
    )
    (store / "deadly.mar").write_bytes(
        zip_of(
            {"h.py": good["h.py"], "state.pkl": pickle.dumps(_Deadly()), "MAR-INF/MANIFEST.json": manifest("deadly")}
        )
    )
    (store / "syntax.mar").write_bytes(
        zip_of({"h.py": b"def handle(data, context):\n    print 'two'\n", "MAR-INF/MANIFEST.json": manifest("syntax")})
    )
    (store / "cut.mar").write_bytes(zip_of(good)[:100])


def make_installation(root: Path) -> Path:
    """The folder, with everything planted."""
    make_archives(root / "model-store")
    (root / "config.properties").write_text(CONFIG)
    (root / "start.sh").write_text(START)
    (root / "Dockerfile").write_text(DOCKERFILE)
    snapshots = root / "logs" / "config"
    snapshots.mkdir(parents=True)
    models = {
        "good": {"1.0": {"defaultVersion": True, "marName": "good.mar"}},
        "lost": {"2.0": {"marName": "lost.mar"}},
    }
    text = json.dumps({"name": "startup.cfg", "modelCount": 2, "created": 1, "models": models})
    (snapshots / "20200102030405006-startup.cfg").write_text(
        f"inference_address=http\\://127.0.0.1\\:8080\nmodel_snapshot={text}\n"
    )
    return root


PLANTED = {
    "config.properties:5": "defualt_workers_per_model is no key",
    "config.properties:6": "job_queue_size=many",
    "config.properties:7": "there is no such file here",
    "start.sh:3": "TS_NO_SUCH_SETTING is no variable",
    "start.sh:4": "installs torchserve",
    "start.sh:5": "--model-stor is no flag",
    "Dockerfile:1": "pytorch/torchserve:0.12.0-cpu",
    "model-store/imports.mar!h.py:2": "no_such_package.part, which is not installed",
    "model-store/names.mar!h.py:2": "ts.nowhere.at_all",
    "model-store/yaml.mar!model-config.yaml:2": "batchSize is 'many'",
    "model-store/nohandler.mar": "lost.py",
    "model-store/deadly.mar": "state.pkl",
    "model-store/syntax.mar!h.py:2": "no Python that runs here",
    "model-store/cut.mar": "cut.mar",
    "logs/config/20200102030405006-startup.cfg:2": "lost 2.0 is lost.mar",
}
