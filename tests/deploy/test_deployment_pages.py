"""What the pages on compose, Kubernetes and KServe tell to type is typed here, with programs that only judge it.

`kubectl`, `docker` and `helm` are small programs of the test that note what they were asked, and refuse files that are
not there; the rest of each line is run as it stands.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from marserve.settings import KEYS
from support.manifests import (
    KSERVE,
    KUBERNETES,
    VERSIONS,
    Document,
    documents,
    judge,
    one,
    render,
    validate,
)
from support.pages import ROOT, block

COMPOSE_PAGE = "docs/deploy/compose.md"
KUBERNETES_PAGE = "docs/deploy/kubernetes.md"
KSERVE_PAGE = "docs/deploy/kserve.md"

_NOTE = """#!/bin/sh
printf '%s\\n' "{name} $*" >> "{asked}"
while [ $# -gt 0 ]; do
  case "$1" in
    -k) [ -f "$2/kustomization.yaml" ] || exit 3; shift ;;
    -f|--values) [ -f "$2" ] || exit 3; shift ;;
  esac
  shift
done
"""


class Desk:
    """A copy of the checkout's parts that the pages name, with the programs of a cluster that is not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._asked = folder / "asked"
        for part in ("docker", "examples/digits/pictures"):
            shutil.copytree(ROOT / part, folder / part)
        (folder / "bin").mkdir()
        for name in ("kubectl", "docker", "helm", "curl"):
            program = folder / "bin" / name
            program.write_text(_NOTE.format(name=name, asked=self._asked))
            program.chmod(0o755)

    def type(self, text: str) -> list[list[str]]:
        """Run a block; what it asked of the programs, word by word."""
        self._asked.unlink(missing_ok=True)
        run = subprocess.run(
            ["sh", "-euc", f"{text}\nwait"],
            cwd=self.folder,
            env={"PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert run.returncode == 0, run.stderr or f"status {run.returncode}"
        return [shlex.split(line) for line in self._asked.read_text().splitlines()]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """Where somebody sits who reads the page."""
    return Desk(tmp_path)


def test_a_file_that_is_not_there_is_noticed(desk: Desk) -> None:
    """So the tests below can fail."""
    for line in ("kubectl apply -k docker/kubernetes/overlays/none", "docker compose -f docker/none.yaml up"):
        with pytest.raises(AssertionError, match="status 3"):
            desk.type(line)


# ------------------------------------------------------------------------------------------------------------ compose


def test_compose_is_started_with_the_examples_variables_and_stopped(desk: Desk) -> None:
    """The copy lies where compose looks for it: beside its file."""
    [started] = desk.type(block(COMPOSE_PAGE, "start"))
    [stopped] = desk.type(block(COMPOSE_PAGE, "stop"))

    assert started == ["docker", "compose", "-f", "docker/compose.yaml", "up", "--build", "--wait"]
    assert (desk.folder / "docker/.env").read_text() == (ROOT / "docker/compose/example.env").read_text()
    assert stopped == ["docker", "compose", "-f", "docker/compose.yaml", "down"]


def test_compose_is_asked_at_ports_and_for_services_that_it_has(desk: Desk) -> None:
    """The picture is in the checkout, the port is published, the model is the one that is loaded."""
    file = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    [asked] = desk.type(block(COMPOSE_PAGE, "ask"))
    [managed] = desk.type(block(COMPOSE_PAGE, "manage"))

    assert (desk.folder / asked[asked.index("-T") + 1]).is_file()
    assert asked[-1] == "http://127.0.0.1:8080/predictions/digits"
    assert "127.0.0.1:8080:8080" in file["services"]["server"]["ports"]
    assert "load_models=s3://models/digits.mar" in (ROOT / "docker/compose/config.properties").read_text()
    assert managed[4:] == ["exec", "server", "marserve", "models"]
    assert "server" in file["services"]


# --------------------------------------------------------------------------------------------------------- Kubernetes


def deployment_of(folder: Path) -> Document:
    """The Deployment of an overlay."""
    return one(render(folder), "Deployment")


def test_the_namespace_is_the_overlays_and_holds_pods_to_the_profile(desk: Desk) -> None:
    """Its label is the one that Kubernetes knows."""
    made, labelled = desk.type(block(KUBERNETES_PAGE, "namespace"))

    assert made == ["kubectl", "create", "namespace", "marserve"]
    assert labelled == ["kubectl", "label", "namespace", "marserve", "pod-security.kubernetes.io/enforce=restricted"]
    assert deployment_of(KUBERNETES / "overlays/cpu")["metadata"]["namespace"] == "marserve"


def test_the_claim_is_the_one_that_the_pods_mount() -> None:
    """By name and namespace, and judged as every manifest."""
    [claim] = documents(block(KUBERNETES_PAGE, "claim"))
    for version in VERSIONS:
        validate(claim, version)

    deployment = deployment_of(KUBERNETES / "overlays/cpu")
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    [mounted] = [volume["persistentVolumeClaim"] for volume in volumes if "persistentVolumeClaim" in volume]
    assert claim["metadata"]["name"] == mounted["claimName"]
    assert claim["metadata"]["namespace"] == deployment["metadata"]["namespace"]


def test_a_folder_of_ones_own_renders_with_its_image_and_number(desk: Desk) -> None:
    """It lies beside `docker`, as its path says."""
    own = desk.folder / "deployment"
    own.mkdir()
    (own / "kustomization.yaml").write_text(block(KUBERNETES_PAGE, "own"))
    applied, watched = desk.type(block(KUBERNETES_PAGE, "apply"))

    assert applied == ["kubectl", "apply", "-k", "deployment"]
    assert watched[-1] == "deployment/marserve"
    rendered = render(own)
    for document in rendered:
        validate(document, VERSIONS[-1])
    deployment = one(rendered, "Deployment")
    assert deployment["spec"]["replicas"] == 4
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"].startswith("registry.example.com/marserve:")


def test_the_service_is_asked_and_a_pod_managed_by_their_names(desk: Desk) -> None:
    """The port that is forwarded is the service's."""
    asked = desk.type(block(KUBERNETES_PAGE, "ask"))
    [managed] = desk.type(block(KUBERNETES_PAGE, "manage"))
    service = one(render(KUBERNETES / "overlays/cpu"), "Service")

    forwarded = next(words for words in asked if words[0] == "kubectl")
    assert forwarded[3:] == ["port-forward", f"service/{service['metadata']['name']}", "8080:8080"]
    assert 8080 in [port["port"] for port in service["spec"]["ports"]]
    assert managed[3:] == ["exec", "deployment/marserve", "--", "marserve", "models"]


def test_the_secret_is_the_one_that_the_init_container_reads(desk: Desk) -> None:
    """And the server itself is not given it."""
    made, applied = desk.type(block(KUBERNETES_PAGE, "store"))
    pod = deployment_of(KUBERNETES / "overlays/store")["spec"]["template"]["spec"]

    [source] = pod["initContainers"][0]["envFrom"]
    assert made[:6] == ["kubectl", "-n", "marserve", "create", "secret", "generic"]
    assert made[6] == source["secretRef"]["name"]
    assert "envFrom" not in pod["containers"][0]
    assert applied == ["kubectl", "apply", "-k", "docker/kubernetes/overlays/store"]


def test_the_adapters_rule_becomes_values_of_its_chart(desk: Desk) -> None:
    """The chart has the list of rules under `rules.custom`."""
    installed, applied = desk.type(block(KUBERNETES_PAGE, "adapter"))

    values = yaml.safe_load((desk.folder / "values.yaml").read_text())
    rule = yaml.safe_load((KUBERNETES / "components/hpa/prometheus-adapter-rule.yaml").read_text())
    assert values == {"rules": {"custom": rule["rules"]}}
    judge(rule, "prometheus-adapter-rules")
    assert installed[:2] == ["helm", "upgrade"]
    assert applied[-1] == "docker/kubernetes/overlays/hpa"


def test_kedas_overlay_is_applied_where_prometheus_is_asked_for(desk: Desk) -> None:
    """The query names the namespace of the pods."""
    [applied] = desk.type(block(KUBERNETES_PAGE, "keda"))
    rendered = render(ROOT / applied[-1])
    scaled = one(rendered, "ScaledObject")

    assert f'namespace="{scaled["metadata"]["namespace"]}"' in scaled["spec"]["triggers"][0]["metadata"]["query"]


@pytest.mark.parametrize(
    ("page", "top"), [(KUBERNETES_PAGE, KUBERNETES / "overlays"), (KSERVE_PAGE, KSERVE)], ids=["kubernetes", "kserve"]
)
def test_a_page_has_every_folder_that_can_be_applied_and_no_other(page: str, top: Path) -> None:
    """In the table at its head."""
    rows = [line for line in (ROOT / page).read_text().split("\n## ")[0].splitlines() if line.startswith("| `")]

    assert {row.split("`")[1] for row in rows} == {path.name for path in top.iterdir() if path.is_dir()}


# ------------------------------------------------------------------------------------------------------------- KServe


def test_the_runtimes_are_applied_from_folders_that_render(desk: Desk) -> None:
    """Both ways of having them."""
    folders = [
        applied[-1]
        for applied in (*desk.type(block(KSERVE_PAGE, "runtimes")), *desk.type(block(KSERVE_PAGE, "in-place")))
    ]

    assert folders == ["docker/kserve/cluster", "docker/kserve/in-place-of-torchserve"]
    kinds = {document["kind"] for folder in folders for document in render(ROOT / folder)}
    assert kinds == {"ClusterServingRuntime"}


def test_the_services_that_are_waited_for_are_those_that_were_applied(desk: Desk) -> None:
    """By their names."""
    applied, awaited = desk.type(block(KSERVE_PAGE, "service"))

    files = [word for word in applied if word.endswith(".yaml")]
    names = [documents((ROOT / file).read_text())[0]["metadata"]["name"] for file in files]
    assert [word.partition("/")[2] for word in awaited if word.startswith("inferenceservice/")] == names


def test_the_buckets_layout_is_what_the_runtime_is_told() -> None:
    """`/mnt/models` and the two paths below."""
    config, archive = block(KSERVE_PAGE, "layout").split()
    [runtime] = documents((KSERVE / "base/runtime-v1.yaml").read_text())
    arguments = runtime["spec"]["containers"][0]["args"]

    assert f"--config=/mnt/models/{config}" in arguments
    assert f"--model-store=/mnt/models/{Path(archive).parent}" in arguments


def test_the_buckets_settings_are_keys_that_there_are() -> None:
    """`tests/deploy/test_pods.py` starts runtimes on a bucket with more of them."""
    pairs = dict(line.split("=", 1) for line in block(KSERVE_PAGE, "config").splitlines())

    assert pairs == {"load_models": "all"}
    assert set(pairs) <= set(KEYS)


def test_the_question_is_protocol_v1s(desk: Desk) -> None:
    """Its body is JSON with `instances`, its route names a model of the example."""
    [asked] = desk.type(block(KSERVE_PAGE, "ask"))

    assert asked[2].endswith("/v1/models/digits:predict")
    assert list(yaml.safe_load(" ".join(asked[asked.index("-d") + 1 :]))) == ["instances"]
