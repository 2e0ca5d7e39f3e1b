"""The manifests of `docker/kubernetes` and `docker/kserve`: Kubernetes takes what they are, and it fits together."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import marserve
from marserve.machine.describe import count_cores
from marserve.pool.pool import threads_for
from marserve.settings import Settings, load_settings
from support.container import Container
from support.manifests import (
    KSERVE,
    KUBERNETES,
    VERSIONS,
    Document,
    Refused,
    containers,
    documents,
    judge,
    kustomizations,
    one,
    pod_specs,
    quantity,
    render,
    validate,
)
from support.pages import ROOT

FOLDERS = [*kustomizations(KUBERNETES), *kustomizations(KSERVE)]
OVERLAYS = [folder for folder in FOLDERS if folder.parent.name == "overlays"]
BASE = KUBERNETES / "base"
FILES = sorted([*KUBERNETES.rglob("*.yaml"), *KSERVE.rglob("*.yaml")])
ADAPTER_RULE = KUBERNETES / "components/hpa/prometheus-adapter-rule.yaml"
IMAGE_VERSION = marserve.__version__


def shown(path: Path) -> str:
    """How a test is called after a path."""
    return str(path.relative_to(ROOT / "docker"))


def file_of(name: str) -> Document:
    """The one document of a file below docker/."""
    [document] = documents((ROOT / "docker" / name).read_text())
    return document


def patches_of(folder: Path) -> set[Path]:
    """The files that a kustomization lays over others: they are no whole documents."""
    if not (folder / "kustomization.yaml").is_file():
        return set()
    kustomization = documents((folder / "kustomization.yaml").read_text())[0]
    return {folder / patch["path"] for patch in kustomization.get("patches", []) if "path" in patch}


# ------------------------------------------------------------------------------------------------------- by schema


@pytest.mark.parametrize("folder", FOLDERS, ids=shown)
@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_folder_renders_to_is_what_kubernetes_takes(folder: Path, version: str) -> None:
    """Strictly: a key that nobody knows is an error, and so is a kind without a schema."""
    rendered = render(folder)

    assert rendered
    for document in rendered:
        validate(document, version)


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_a_file_is_right_by_itself(path: Path) -> None:
    """Also where nothing is there to render with: whole documents, and kustomizations that name what is there."""
    if path in patches_of(path.parent):
        assert documents(path.read_text())
        return
    for document in documents(path.read_text()):
        if path == ADAPTER_RULE:
            judge(document, "prometheus-adapter-rules")
            continue
        for version in VERSIONS:
            validate(document, version)
        if path.name == "kustomization.yaml":
            named = [*document.get("resources", []), *document.get("components", [])]
            named += [file for each in document.get("configMapGenerator", []) for file in each["files"]]
            assert [name for name in named if not (path.parent / name).exists()] == []


@pytest.mark.parametrize(
    ("file", "path", "value", "complaint"),
    [
        ("kubernetes/base/deployment.yaml", "spec/template/spec/containers/0/readinesProbe", {}, "readinesProbe"),
        ("kubernetes/base/deployment.yaml", "spec/template/spec/terminationGracePeriod", 60, "terminationGracePeriod"),
        ("kubernetes/base/deployment.yaml", "spec/replicas", "two", "'two'"),
        ("kubernetes/base/network-policy.yaml", "spec/ingres", [], "ingres"),
        ("kubernetes/base/disruption-budget.yaml", "spec/maxUnavaliable", 1, "maxUnavaliable"),
        ("kubernetes/components/hpa/autoscaler.yaml", "spec/metrics/0/pod", {}, "'pod' was unexpected"),
        ("kubernetes/components/hpa/autoscaler.yaml", "kind", "HorizontalPodScaler", "there is no schema"),
        ("kubernetes/components/keda/scaled-object.yaml", "spec/triggers/0/metadata/treshold", "1", "treshold"),
        ("kubernetes/components/keda/scaled-object.yaml", "spec/triggers/0/metadata/threshold", 0.1, "not of type"),
        (
            "kubernetes/components/keda/scaled-object.yaml",
            "spec/advanced/horizontalPodAutoscalerConfig/behavior/scaleDwn",
            {},
            "scaleDwn",
        ),
        ("kubernetes/components/monitoring/service-monitor.yaml", "spec/endpoints/0/intervall", "15s", "intervall"),
        ("kubernetes/components/monitoring/service-monitor.yaml", "apiVersion", "monitoring/v1", "there is no schema"),
        ("kserve/base/runtime-v1.yaml", "spec/containers/0/enviroment", [], "enviroment"),
        ("kserve/base/runtime-v1.yaml", "spec/protocolVersions/0", "v3", "'v3' is not one of"),
        ("kserve/examples/v1.yaml", "spec/predictor/model/storageURI", "s3://a", "storageURI"),
        ("kserve/examples/v1.yaml", "spec/predictor/model/storageUri", "models/digits", "does not match"),
        ("kserve/base/kustomization.yaml", "resource", [], "'resource' was unexpected"),
    ],
)
def test_a_planted_mistake_is_found(file: str, path: str, value: Any, complaint: str) -> None:
    """So these tests can fail."""
    document = file_of(file)
    *way, last = path.split("/")
    place: Any = document
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    place[int(last) if last.isdigit() else last] = value

    with pytest.raises(Refused, match=re.escape(complaint)):
        validate(document, VERSIONS[-1])


def test_a_key_that_stands_twice_is_found() -> None:
    """YAML readers take the last one and say nothing."""
    with pytest.raises(Refused, match="line 1: kind stands twice"):
        documents("kind: Pod\nkind: Service\n")


# ------------------------------------------------------------------------------------------- the restricted profile


def profile_problems(spec: Document) -> Iterator[str]:
    """What Kubernetes' pod security standard "restricted" has against a pod, and a root that can be written."""
    pod = spec.get("securityContext", {})
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(key):
            yield key
    for volume in spec.get("volumes", []):
        kinds = set(volume) - {"name"}
        if not kinds <= {
            "configMap",
            "csi",
            "downwardAPI",
            "emptyDir",
            "ephemeral",
            "persistentVolumeClaim",
            "projected",
            "secret",
        }:
            yield f"volume {volume['name']}: {sorted(kinds)}"
    for container in containers(spec):
        own = container.get("securityContext", {})
        name = container["name"]
        if own.get("allowPrivilegeEscalation") is not False:
            yield f"{name}: allowPrivilegeEscalation"
        if own.get("privileged"):
            yield f"{name}: privileged"
        if own.get("capabilities", {}).get("drop") != ["ALL"] or own.get("capabilities", {}).get("add"):
            yield f"{name}: capabilities"
        if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
            yield f"{name}: runAsNonRoot"
        if 0 in (own.get("runAsUser"), pod.get("runAsUser")):
            yield f"{name}: runAsUser"
        if own.get("seccompProfile", pod.get("seccompProfile", {})).get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{name}: seccompProfile"
        if own.get("readOnlyRootFilesystem") is not True:
            yield f"{name}: readOnlyRootFilesystem"
        if any("hostPort" in port for port in container.get("ports", [])):
            yield f"{name}: hostPort"


@pytest.mark.parametrize("folder", FOLDERS, ids=shown)
def test_every_pod_keeps_to_the_restricted_profile(folder: Path) -> None:
    """And none names a user: the image does, by its number, and OpenShift chooses others."""
    for owner, spec in pod_specs(render(folder)):
        assert list(profile_problems(spec)) == [], owner
        assert all("runAsUser" not in part.get("securityContext", {}) for part in (spec, *containers(spec))), owner

    assert re.search(r"^USER 1000(:\d+)?$", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec["containers"][0]["securityContext"].pop("allowPrivilegeEscalation"),
        lambda spec: spec["containers"][0]["securityContext"].pop("capabilities"),
        lambda spec: spec["containers"][0]["securityContext"]["capabilities"].update(add=["NET_ADMIN"]),
        lambda spec: spec["containers"][0]["securityContext"].update(readOnlyRootFilesystem=False),
        lambda spec: spec["securityContext"].pop("seccompProfile"),
        lambda spec: spec["securityContext"].pop("runAsNonRoot"),
        lambda spec: spec["volumes"].append({"name": "host", "hostPath": {"path": "/"}}),
        lambda spec: spec.update(hostNetwork=True),
    ],
)
def test_what_the_profile_forbids_is_found(change: Any) -> None:
    """One thing wrong is one complaint."""
    spec = copy.deepcopy(file_of("kubernetes/base/deployment.yaml")["spec"]["template"]["spec"])
    assert list(profile_problems(spec)) == []

    change(spec)

    assert len(list(profile_problems(spec))) == 1


# ------------------------------------------------------------------------------------------------- what fits together


@pytest.mark.parametrize("folder", OVERLAYS, ids=shown)
def test_everything_in_an_overlay_names_what_is_there(folder: Path) -> None:
    """Selectors find the pods, ports have their names, volumes are there and are mounted, scalers have their target."""
    rendered = render(folder)
    deployment = one(rendered, "Deployment")
    template = deployment["spec"]["template"]
    labels, spec = template["metadata"]["labels"], template["spec"]
    ports = {port["name"]: port["containerPort"] for port in spec["containers"][0]["ports"]}
    services, policies = (
        {each["metadata"]["name"]: each["spec"] for each in rendered if each["kind"] == kind}
        for kind in ("Service", "NetworkPolicy")
    )

    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        *(each["selector"] for each in services.values()),
        *(each["podSelector"]["matchLabels"] for each in policies.values()),
        one(rendered, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        *(each["labelSelector"]["matchLabels"] for each in spec["topologySpreadConstraints"]),
    ]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)
    offered = {port["targetPort"]: port["port"] for each in services.values() for port in each["ports"]}
    assert offered == ports
    opened = {rule["port"] for each in policies.values() for way in each["ingress"] for rule in way["ports"]}
    assert opened == set(ports)
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    assert {spec["containers"][0][probe]["httpGet"]["port"] for probe in probes} <= set(ports)
    volumes = [volume["name"] for volume in spec["volumes"]]
    mounts = [mount["name"] for container in containers(spec) for mount in container["volumeMounts"]]
    assert set(volumes) == set(mounts)
    assert spec["serviceAccountName"] == one(rendered, "ServiceAccount")["metadata"]["name"]
    configured = {volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume}
    assert configured <= {each["metadata"]["name"] for each in rendered if each["kind"] == "ConfigMap"}
    for scaler in (each for each in rendered if each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")):
        target = scaler["spec"]["scaleTargetRef"]
        named = (target["apiVersion"], target["kind"], target["name"])
        assert named == (deployment["apiVersion"], "Deployment", deployment["metadata"]["name"])
        assert "replicas" not in deployment["spec"], "each apply would undo what the scaler decided"
    for monitor in (each for each in rendered if each["kind"] == "ServiceMonitor"):
        service = one(rendered, "Service")
        assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert {each["port"] for each in monitor["spec"]["endpoints"]} <= {
            each["name"] for each in service["spec"]["ports"]
        }
        # kube-prometheus-stack's Prometheus takes what carries its release's name.
        assert monitor["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    assert {each["metadata"]["namespace"] for each in rendered} == {"marserve"}


@pytest.mark.parametrize("folder", OVERLAYS, ids=shown)
def test_a_pods_volumes_fit_into_its_ephemeral_storage(folder: Path) -> None:
    """The kubelet evicts a pod whose volumes on the node's disk hold more than its containers' limits allow."""
    spec = one(render(folder), "Deployment")["spec"]["template"]["spec"]
    on_disk = [
        quantity(volume["emptyDir"]["sizeLimit"])
        for volume in spec["volumes"]
        if volume.get("emptyDir") is not None and volume["emptyDir"].get("medium") != "Memory"
    ]

    for container in containers(spec):
        assert sum(on_disk) <= quantity(container["resources"]["limits"]["ephemeral-storage"]), container["name"]


def test_the_runtime_in_torchserves_place_announces_what_kserves_own_does() -> None:
    """A service that asks for a protocol finds it, and gRPC's port is open beyond the pod."""
    runtime = file_of("kserve/in-place-of-torchserve/runtime.yaml")
    [container] = runtime["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}

    assert runtime["metadata"]["annotations"] == {"serving.kserve.io/server-type": "torchserve"}
    assert runtime["spec"]["protocolVersions"] == ["v1", "v2", "grpc-v2"]
    assert (variables["MARSERVE_GRPC_INFERENCE_ADDRESS"], variables["MARSERVE_GRPC_INFERENCE_PORT"]) == (
        "0.0.0.0",
        "7070",
    )


@pytest.mark.parametrize("folder", FOLDERS, ids=shown)
def test_images_are_named_by_this_version(folder: Path) -> None:
    """Never by a name that may mean another image tomorrow."""
    images = [container["image"] for _, spec in pod_specs(render(folder)) for container in containers(spec)]

    build = "gpu" if folder.name == "gpu" else "cpu"
    assert set(images) == {f"marserve:{IMAGE_VERSION}-{build}"}


def test_the_gpu_overlay_waits_for_no_gpu_that_is_taken() -> None:
    """With surge a roll-out stands still on a cluster whose GPUs are all in use."""
    deployment = one(render(KUBERNETES / "overlays/gpu"), "Deployment")
    resources = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]

    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "1"


def test_the_network_policy_leaves_management_closed() -> None:
    """Its ports are in no rule, and the server does not even listen there beyond its pod."""
    policy, deployment = (file_of(f"kubernetes/base/{name}.yaml") for name in ("network-policy", "deployment"))
    ports = {
        each["name"]: each["containerPort"] for each in deployment["spec"]["template"]["spec"]["containers"][0]["ports"]
    }

    assert policy["spec"]["policyTypes"] == ["Ingress"]
    opened = {ports[rule["port"]] for each in policy["spec"]["ingress"] for rule in each["ports"]}
    assert opened == {8080, 7070, 8082}
    assert all("ports" in rule for rule in policy["spec"]["ingress"]), "a rule without ports opens all of them"


def test_the_component_opens_management_to_marked_pods_alone(tmp_path: Path) -> None:
    """The server listens beyond its pod by the operator's word, and one way leads there."""
    settings = settings_of_overlay(KUBERNETES / "overlays/management", tmp_path)
    policy = one(render(KUBERNETES / "overlays/management"), "NetworkPolicy", "marserve-management")

    assert settings.allow_open_management
    assert not settings.management_address.is_loopback
    assert policy["spec"]["ingress"] == [
        {
            "from": [{"podSelector": {"matchLabels": {"marserve-management": "true"}}}],
            "ports": [{"port": "mdl", "protocol": "TCP"}],
        }
    ]


# -------------------------------------------------------------------------------------------------- numbers that agree


def settings_of(tmp_path: Path, text: str, variables: dict[str, str] | None = None) -> Settings:
    """The settings that a file of a ConfigMap comes to in a container."""
    container = Container(tmp_path)
    container.write("/home/model-server/config/config.properties", text)
    return load_settings(
        "marserve",
        {"ts_config": str(container.path("/home/model-server/config/config.properties"))},
        container.environment(variables or {}),
        container.path("/home/model-server"),
    )


def settings_of_overlay(folder: Path, tmp_path: Path) -> Settings:
    """What a pod of an overlay runs with: its ConfigMap, where it is mounted, and its variables."""
    rendered = render(folder)
    spec = one(rendered, "Deployment")["spec"]["template"]["spec"]
    [container] = spec["containers"]
    has_config = any("configMap" in volume for volume in spec["volumes"])
    text = str(one(rendered, "ConfigMap")["data"]["config.properties"]) if has_config else ""
    return settings_of(tmp_path, text, {each["name"]: each["value"] for each in container.get("env", [])})


def test_the_settings_of_the_config_map_are_taken_without_a_warning(tmp_path: Path) -> None:
    """Management stays in the pod, the rest is open, and what is scraped is there."""
    settings = settings_of(tmp_path, (BASE / "config.properties").read_text())

    assert settings.warnings == ()
    assert settings.management_address.is_loopback
    assert (settings.inference_address.host, settings.metrics_address.host) == ("0.0.0.0", "0.0.0.0")
    assert settings.grpc_inference_address == "0.0.0.0"
    assert settings.metrics_mode == "prometheus"
    assert settings.load_models == "all"


@pytest.mark.parametrize("folder", OVERLAYS, ids=shown)
def test_a_pod_has_the_time_that_its_end_may_take(folder: Path, tmp_path: Path) -> None:
    """The kubelet counts from before preStop; at the end of its patience it kills."""
    settings = settings_of_overlay(folder, tmp_path)
    spec = one(render(folder), "Deployment")["spec"]["template"]["spec"]
    pause = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]

    asked = pause + settings.drain_delay + settings.drain_timeout
    assert settings.drain_delay == 5
    assert asked + 15 <= spec["terminationGracePeriodSeconds"] <= asked + 60


def test_a_server_of_kserve_ends_within_a_pods_usual_time(tmp_path: Path) -> None:
    """Its runtimes cannot say how long: 30 s is what a pod has that nobody gave more."""
    for file in ("base/runtime-v1", "base/runtime-v2", "base/runtime-grpc-v2", "in-place-of-torchserve/runtime"):
        [container] = file_of(f"kserve/{file}.yaml")["spec"]["containers"]
        variables = {each["name"]: each["value"] for each in container["env"]}

        delay, timeout = (float(variables[f"MARSERVE_{key}"]) for key in ("DRAIN_DELAY", "DRAIN_TIMEOUT"))
        assert delay >= 5
        assert delay + timeout <= 25


def test_a_model_may_take_longer_to_load_than_one_try_may() -> None:
    """Who loads for long is not restarted for it: the start's probe waits for several tries, and no other asks then."""
    container = file_of("kubernetes/base/deployment.yaml")["spec"]["template"]["spec"]["containers"][0]
    probes = {name: container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}

    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths == {"startup": "/startupz", "liveness": "/livez", "readiness": "/readyz"}
    patience = probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"]
    assert patience >= 10 * 120, "ten times default_startup_timeout"
    progress = file_of("kubernetes/base/deployment.yaml")["spec"]["progressDeadlineSeconds"]
    assert progress > patience
    assert probes["liveness"]["periodSeconds"] * probes["liveness"]["failureThreshold"] >= 30


@pytest.mark.parametrize("folder", OVERLAYS, ids=shown)
def test_the_cores_of_a_pod_are_those_that_its_workers_compute_with(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet writes the limit into cpu.max; the server reads it, whatever the node has."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for container in containers(one(render(folder), "Deployment")["spec"]["template"]["spec"]):
        resources = container["resources"]
        limit = quantity(resources["limits"]["cpu"])
        quota = tmp_path / container["name"] / "sys/fs/cgroup"
        quota.mkdir(parents=True)
        (quota / "cpu.max").write_text(f"{limit * 100000:.0f} 100000\n")

        cores = count_cores(tmp_path / container["name"])

        assert cores == limit == quantity(resources["requests"]["cpu"])
        assert quantity(resources["limits"]["memory"]) == quantity(resources["requests"]["memory"])
        for workers in range(1, cores + 1):
            assert workers * threads_for(workers, cores, None) <= limit
        assert threads_for(cores, cores, None) == 1


def test_quantities_are_read_as_kubernetes_reads_them() -> None:
    """What the test above counts with."""
    assert [quantity(text) for text in ("2", "500m", "4Gi", "1M", "1.5k")] == [2, 0.5, 4 << 30, 10**6, 1500]
    with pytest.raises(ValueError, match="no quantity"):
        quantity("4GB")


def test_both_autoscalers_watch_the_same_and_move_alike() -> None:
    """One asks the adapter, the other Prometheus."""
    hpa = file_of("kubernetes/components/hpa/autoscaler.yaml")["spec"]
    keda = file_of("kubernetes/components/keda/scaled-object.yaml")["spec"]
    [rule] = file_of("kubernetes/components/hpa/prometheus-adapter-rule.yaml")["rules"]
    metric = hpa["metrics"][0]["pods"]
    [trigger] = keda["triggers"]

    assert metric["metric"]["name"] == rule["name"]["as"]
    assert quantity(metric["target"]["averageValue"]) == float(trigger["metadata"]["threshold"])
    assert (hpa["minReplicas"], hpa["maxReplicas"]) == (keda["minReplicaCount"], keda["maxReplicaCount"])
    assert hpa["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    of_adapter = (
        rule["metricsQuery"].replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", 'namespace="marserve"')
    )
    assert " ".join(trigger["metadata"]["query"].split()) == " ".join(f"avg({of_adapter})".split())
