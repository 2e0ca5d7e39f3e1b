"""Kubernetes manifests of this repository: rendering overlays, and judging documents by schemas.

A kind that Kubernetes has is judged by its schema, strictly; another by ours in `tests/schemas/`, and what in it is a
pod's or an autoscaler's by Kubernetes' again. A kind without a schema is an error.
"""

from __future__ import annotations

import functools
import json
import pickle
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml

from support.pages import ROOT

VERSIONS = ("1.30", "1.34", "1.37")
"""The pinned versions: the first that has `preStop.sleep` by itself, and later ones."""

KUBERNETES = ROOT / "docker/kubernetes"
KSERVE = ROOT / "docker/kserve"
SCHEMAS = ROOT / "tests/schemas"

OWN_SCHEMAS = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): "service-monitor",
    ("keda.sh/v1alpha1", "ScaledObject"): "scaled-object",
    ("serving.kserve.io/v1alpha1", "ServingRuntime"): "serving-runtime",
    ("serving.kserve.io/v1alpha1", "ClusterServingRuntime"): "serving-runtime",
    ("serving.kserve.io/v1beta1", "InferenceService"): "inference-service",
    ("kustomize.config.k8s.io/v1beta1", "Kustomization"): "kustomization",
    ("kustomize.config.k8s.io/v1alpha1", "Component"): "kustomization",
}

Document = dict[str, Any]


class Refused(Exception):
    """A schema, or the want of one, is against this document."""


# -------------------------------------------------------------------------------------------------------- rendering


def renderer() -> list[str]:
    """The command that renders a folder. Skips the test where there is none."""
    kustomize, kubectl = shutil.which("kustomize"), shutil.which("kubectl")
    if kustomize is not None:
        return [kustomize, "build"]
    if kubectl is not None:
        return [kubectl, "kustomize"]
    pytest.skip("neither kubectl nor kustomize is installed: overlays cannot be rendered here")


@functools.cache
def _rendered(command: tuple[str, ...], folder: Path) -> str:
    run = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def render(folder: Path) -> list[Document]:
    """What a folder with a kustomization comes to."""
    return documents(_rendered(tuple(renderer()), folder))


def documents(text: str) -> list[Document]:
    """The documents of a YAML text, for the caller to change; each key may stand once."""
    found: list[Document] = pickle.loads(_documents(text))
    return found


@functools.cache
def _documents(text: str) -> bytes:
    """Reading takes ten times as long as a copy."""
    return pickle.dumps([document for document in yaml.load_all(text, _StrictLoader) if document])


class _StrictLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML as Kubernetes takes it: of a key that stands twice nobody knows which counts."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As the safe loader, but strict."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise Refused(f"line {node.start_mark.line + 1}: {', '.join(twice)} stands twice")
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


def kustomizations(top: Path) -> list[Path]:
    """The folders below this one that can be applied: overlays and bases, not components."""
    return sorted(
        path.parent for path in top.rglob("kustomization.yaml") if documents(path.read_text())[0]["kind"] != "Component"
    )


# --------------------------------------------------------------------------------------------------------- judging


# Documents that were judged and are right, with the version: the overlays have most of theirs in common.
_taken: set[tuple[str, str]] = set()


def validate(document: Document, version: str) -> None:
    """Judge one document by this version of Kubernetes. Raises Refused with the place and what is wrong there."""
    told = (repr(document), version)
    if told not in _taken:
        _validate(document, version)
        _taken.add(told)


def _validate(document: Document, version: str) -> None:
    kind, api = document.get("kind"), document.get("apiVersion")
    own = OWN_SCHEMAS.get((str(api), str(kind)))
    if own is not None:
        judge(document, own)
        for part in _parts_of_kubernetes(document):
            validate(part, version)
        return
    try:
        with _schemas_read_once():
            judged_by = kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.SchemaNotFoundError as error:
        raise Refused(f"there is no schema of the kind {kind} of {api}") from error
    except kubernetes_validate.ValidationError as error:
        raise Refused(f"{kind} {'.'.join(map(str, error.path))}: {error.message}") from error
    assert judged_by == version, f"kubernetes-validate has no schemas of {version}, and took those of {judged_by}"


_schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


@contextmanager
def _schemas_read_once() -> Iterator[None]:
    """The library reads a version's definitions, a file of a megabyte, for each document anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", _schema_contents)
        yield


def judge(document: Any, name: str) -> None:
    """Judge a document by one of our own schemas. Raises Refused."""
    for error in sorted(_own_validator(name).iter_errors(document), key=str):
        raise Refused(f"{name} {'.'.join(map(str, error.path))}: {error.message}")


@functools.cache
def _own_validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{name}.json").read_text()))


def _parts_of_kubernetes(document: Document) -> Iterator[Document]:
    """What of another's kind Kubernetes has a schema for, as documents of such kinds."""
    spec = document.get("spec", {})
    about = {"metadata": {"name": "part"}}
    if "Runtime" in document["kind"]:
        taken = ("containers", "volumes", "tolerations", "affinity", "nodeSelector", "imagePullSecrets")
        yield {
            "apiVersion": "v1",
            "kind": "Pod",
            **about,
            "spec": {key: value for key, value in spec.items() if key in taken},
        }
    if document["kind"] == "InferenceService":
        model = spec["predictor"]["model"]
        container = {"name": "c", **{key: model[key] for key in ("env", "args", "resources") if key in model}}
        yield {"apiVersion": "v1", "kind": "Pod", **about, "spec": {"containers": [container]}}
    if document["kind"] == "ScaledObject":
        scaling = {
            "scaleTargetRef": {"kind": "Deployment", **spec["scaleTargetRef"]},
            "maxReplicas": spec.get("maxReplicaCount", 1),
            "behavior": spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", {}).get("behavior", {}),
        }
        yield {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", **about, "spec": scaling}


# --------------------------------------------------------------------------------------------- reading what is there


def one(found: list[Document], kind: str, name: str | None = None) -> Document:
    """The one document of this kind, or of this kind and name."""
    [document] = [
        each for each in found if each["kind"] == kind and name in (None, each.get("metadata", {}).get("name"))
    ]
    return document


def pod_specs(found: list[Document]) -> Iterator[tuple[str, Document]]:
    """The pod specs among these documents, each with its owner's name."""
    for document in found:
        spec = document.get("spec", {})
        if document["kind"] == "Deployment":
            yield f"Deployment {document['metadata']['name']}", spec["template"]["spec"]
        elif "Runtime" in document["kind"]:
            yield f"{document['kind']} {document['metadata']['name']}", spec


def containers(spec: Mapping[str, Any]) -> list[Document]:
    """All containers of a pod, those that only prepare it first."""
    return [*spec.get("initContainers", []), *spec["containers"]]


def quantity(text: str) -> float:
    """A quantity of Kubernetes as a number: cores or bytes. Raises ValueError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(m|[kMGTPE]i?|Ki)?", str(text))
    if found is None:
        raise ValueError(f"{text!r} is no quantity")
    unit = found[2] or ""
    if unit == "m":
        return float(found[1]) / 1000
    power = " kMGTPE".index(unit[0].replace("K", "k")) if unit else 0
    return float(found[1]) * (1024 if unit.endswith("i") else 1000) ** power
