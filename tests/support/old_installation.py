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
enable_envvars_config=true
allowed_urls=https://models[.]test/.*
load_models=good.mar,https://elsewhere.test/m.mar
models={"good": {"1.0": {"minWorkers": 1
metrics_format=prometheus
"""

START = """\
#!/bin/sh
# torchserve --not-a-command
export TS_NO_SUCH_SETTING=1
pip install torchserve==0.12.0 torch-model-archiver
torchserve --start --foreground \\
    --ts-config config.properties --model-sotre ./model-store \\
    --log-config log4j2.xml
torchserve --start --model-stor ./model-store --ts-config gone.properties
torchserve --start --ncs --model-store ./model-store --model good.mar
torchserve --start --ncs --model-store ./model-store --models good=good.mar lost=lost.mar
torchserve --start --ncs --model-store /var/lib/gone
"""

UNIT = """\
[Service]
Environment=JAVA_HOME=/usr/lib/jvm/java-17
Environment="TS_JOB_QUEUE_SIZE=lots"
ExecStart=/opt/venv/bin/torchserve --start --foreground --workflow-stor=./nowhere
ExecStop=/opt/venv/bin/torchserve --stop
"""

COMPOSE = """\
services:
  models:
    image: pytorch/torchserve:latest-cpu
    environment:
      TS_NUMBER_OF_NETTY_THREADS: "4"
      TS_NO_SUCH_THING: "1"
    command:
      - torchserve
      - --start
      - --model-store=model-store
      - --no-such-flag
  sidecar:
    image: nginx
"""

CLUSTER = """\
apiVersion: v1
kind: ConfigMap
data:
  config.properties: |
    inference_address=http://0.0.0.0:8085
    job_queue_size=ten
    model_store=model-store
---
apiVersion: serving.kserve.io/v1alpha1
kind: ServingRuntime
spec:
  containers:
    - image: pytorch/torchserve-kfs:0.12.0
      args: [torchserve, --start, --model-store=model-store, --ts-config=lost/settings.properties]
      env:
        - name: TS_SERVICE_ENVELOPE
          value: kserve
"""

PACKAGES = """\
# torchserve is what serves
torch==2.1.0
torchserve>=0.9
torch-model-archiver
"""

SPEC = b"""\
models:
  min-workers: 1
  first:
    url: good.mar
  second:
    url: nowhere.mar
dag:
  first: [second]
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


INTERNALS = b"""\
from ts.torch_handler.base_handler import BaseHandler
from ts.model_loader import ModelLoaderFactory

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
    (store / "runtime.mar").write_bytes(
        zip_of({"h.py": good["h.py"], "MAR-INF/MANIFEST.json": manifest("runtime").replace(b'"python"', b'"ruby"')})
    )
    (store / "function.mar").write_bytes(
        zip_of({"h.py": good["h.py"], "MAR-INF/MANIFEST.json": manifest("function", handler="h:predict")})
    )
    (store / "weights.mar").write_bytes(
        zip_of({"h.py": good["h.py"], "MAR-INF/MANIFEST.json": manifest("weights", serializedFile="weights.pt")})
    )
    (store / "internals.mar").write_bytes(zip_of({"h.py": INTERNALS, "MAR-INF/MANIFEST.json": manifest("internals")}))
    workflow = {
        "createdOn": "02/01/2020 03:04:06",
        "archiverVersion": "0.2.15",
        "workflow": {"workflowName": "chain", "specFile": "workflow.yaml", "handler": "f.py"},
    }
    (store / "chain.war").write_bytes(
        zip_of({"workflow.yaml": SPEC, "f.py": b"", "WAR-INF/MANIFEST.json": json.dumps(workflow).encode()})
    )
    unpacked = {"h.py": b"import lost_package\n" + good["h.py"], "MAR-INF/MANIFEST.json": manifest("unpacked")}
    for name, data in unpacked.items():
        (store / "unpacked" / name).parent.mkdir(parents=True, exist_ok=True)
        (store / "unpacked" / name).write_bytes(data)


def make_installation(root: Path) -> Path:
    """The folder, with everything planted."""
    make_archives(root / "model-store")
    (root / "config.properties").write_text(CONFIG)
    (root / "start.sh").write_text(START)
    (root / "Dockerfile").write_text(DOCKERFILE)
    (root / "torchserve.service").write_text(UNIT)
    (root / "docker-compose.yml").write_text(COMPOSE)
    (root / "cluster.yaml").write_text(CLUSTER)
    (root / "requirements.txt").write_text(PACKAGES)
    (root / "log4j2.xml").write_text("<Configuration/>")
    (root / "key_file.json").write_text("{}")
    snapshots = root / "logs" / "config"
    snapshots.mkdir(parents=True)
    numbers = {"defaultVersion": True, "minWorkers": 1, "maxWorkers": 1, "batchSize": 1, "maxBatchDelay": 100}
    models = {
        "good": {"1.0": {**numbers, "marName": "good.mar"}},
        "lost": {"2.0": {**numbers, "marName": "lost.mar"}},
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
    "config.properties:12": "Given URL https://elsewhere.test/m.mar does not match any allowed URL",
    "config.properties:13": "models=",
    "config.properties:14": "metrics_format is not read any more",
    "start.sh:3": "TS_NO_SUCH_SETTING is no variable",
    "start.sh:4": "installs torchserve",
    "start.sh:5": "--model-sotre is no flag",
    "start.sh:8": "--ts-config gone.properties: there is no such file",
    "start.sh:9": "--model may mean --model-store or --models",
    "start.sh:10": "lost.mar is in no store here",
    "start.sh:11": "--model-store /var/lib/gone: there is no such folder",
    "torchserve.service:3": "TS_JOB_QUEUE_SIZE=lots",
    "torchserve.service:4": "--workflow-store ./nowhere: there is no such folder",
    "docker-compose.yml:3": "pytorch/torchserve:latest-cpu",
    "docker-compose.yml:6": "TS_NO_SUCH_THING is no variable",
    "docker-compose.yml:11": "--no-such-flag is no flag",
    "cluster.yaml:6": "job_queue_size=ten",
    "cluster.yaml:13": "pytorch/torchserve-kfs:0.12.0",
    "cluster.yaml:14": "--ts-config lost/settings.properties: there is no such file",
    "Dockerfile:1": "pytorch/torchserve:0.12.0-cpu",
    "requirements.txt:3": "asks for torchserve",
    "model-store/imports.mar!h.py:2": "no_such_package.part, which is not installed",
    "model-store/names.mar!h.py:2": "ts.nowhere.at_all",
    "model-store/yaml.mar!model-config.yaml:2": "batchSize is 'many'",
    "model-store/nohandler.mar": "lost.py",
    "model-store/deadly.mar": "state.pkl",
    "model-store/syntax.mar!h.py:2": "no Python that runs here",
    "model-store/cut.mar": "cut.mar",
    "model-store/runtime.mar!MAR-INF/MANIFEST.json": "runtime is 'ruby'",
    "model-store/function.mar!h.py": "has no predict",
    "model-store/weights.mar!MAR-INF/MANIFEST.json": "the archive has no weights.pt",
    "model-store/chain.war!workflow.yaml:6": "nowhere.mar is in no store here",
    "model-store/unpacked/h.py:1": "imports lost_package",
    "logs/config/20200102030405006-startup.cfg:2": "lost 2.0 is lost.mar",
}
