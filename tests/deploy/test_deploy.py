"""The files in deploy/ are consistent. They are not tested against Kubernetes; see deploy/README.md."""

import re
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from paceline.core.cluster_config import cluster_config
from paceline.deploy.engine_process import GRACE
from paceline.deploy.processes.cluster_file import is_cluster_file, load_cluster
from paceline.gateway.config.config import SETTINGS, ServerConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCUMENTS = {d["kind"]: d for d in yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())}
HEAD = DOCUMENTS["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]
(GROUP,) = DOCUMENTS["RayCluster"]["spec"]["workerGroupSpecs"]
WORKER = GROUP["template"]["spec"]
GATEWAY = DOCUMENTS["Deployment"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", ["cluster.yaml", "laptop.yaml"])
def test_examples_are_clusters(name: str) -> None:
    assert is_cluster_file(DEPLOY / name)
    config = load_cluster(DEPLOY / name)
    assert [pool.role for pool in config.pools] == ["target", "draft"]
    assert all(0 < engine.memory_fraction < 1 for engine in config.engines().values())


def test_example_with_a_prefill_pool() -> None:
    config = load_cluster(DEPLOY / "prefill.yaml")
    assert [pool.role for pool in config.pools] == ["target", "prefill"]
    assert config.handoff_threshold == 512


def test_cluster_of_the_config_map_fits_its_nodes() -> None:
    config = cluster_config(yaml.safe_load(DOCUMENTS["ConfigMap"]["data"]["cluster.yaml"]))
    gpus = sum(pool.ray.num_gpus for pool in config.pools)
    limits = WORKER["containers"][0]["resources"]["limits"]
    assert gpus <= float(limits["nvidia.com/gpu"])  # one pair per node
    assert sum(pool.ray.num_cpus for pool in config.pools) <= float(limits["cpu"])
    assert GROUP["minReplicas"] <= GROUP["replicas"] == config.targets[0].replicas < GROUP["maxReplicas"]
    assert config.gateway["gateways"] == DOCUMENTS["Deployment"]["spec"]["replicas"]
    assert config.gateway["port"] == GATEWAY["containers"][0]["ports"][0]["containerPort"]


class Autoscaler(msgspec.Struct, forbid_unknown_fields=True):
    """`autoscalerOptions` of `ray.io/v1`, as far as the file uses it; so are the classes below."""

    idleTimeoutSeconds: int
    resources: dict[str, dict[str, str]]


class HeadGroup(msgspec.Struct, forbid_unknown_fields=True):
    rayStartParams: dict[str, str]
    template: dict[str, Any]


class WorkerGroup(msgspec.Struct, forbid_unknown_fields=True):
    groupName: str
    minReplicas: int
    maxReplicas: int
    replicas: int
    rayStartParams: dict[str, str]
    template: dict[str, Any]


class RayCluster(msgspec.Struct, forbid_unknown_fields=True):
    rayVersion: str
    enableInTreeAutoscaling: bool
    autoscalerOptions: Autoscaler
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]


def test_ray_cluster_has_the_fields_of_its_schema() -> None:
    assert DOCUMENTS["RayCluster"]["apiVersion"] == "ray.io/v1"
    spec = msgspec.convert(DOCUMENTS["RayCluster"]["spec"], RayCluster)
    assert spec.enableInTreeAutoscaling
    assert float(spec.headGroupSpec.rayStartParams["num-cpus"]) == 0  # workers run on the nodes of the group


@pytest.mark.parametrize("pod", [HEAD, WORKER, GATEWAY])
def test_mounts_have_volumes_and_keys_are_mounted(pod: dict[str, Any]) -> None:
    config = cluster_config(yaml.safe_load(DOCUMENTS["ConfigMap"]["data"]["cluster.yaml"]))
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounts = {m["mountPath"]: m["name"] for c in pod["containers"] for m in c["volumeMounts"]}
    assert set(mounts.values()) <= volumes
    assert config.keys in mounts
    (copy,) = pod["initContainers"]
    assert {m["name"] for m in copy["volumeMounts"]} <= volumes
    assert mounts[config.keys] in {m["name"] for m in copy["volumeMounts"]}
    assert {c["image"] for c in (*pod["containers"], copy)} == {"paceline:latest"}


def test_service_and_probes_match_the_gateway() -> None:
    labels = DOCUMENTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert DOCUMENTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert DOCUMENTS["Service"]["spec"]["selector"] == labels
    (container,) = GATEWAY["containers"]
    ports = {port["name"] for port in container["ports"]}
    assert DOCUMENTS["Service"]["spec"]["ports"][0]["targetPort"] in ports
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports


def test_ray_version_is_the_same_everywhere() -> None:
    constraints = (DEPLOY.parent / "constraints.txt").read_text()
    version = DOCUMENTS["RayCluster"]["spec"]["rayVersion"]
    assert f"ray=={version}\n" in constraints
    assert (
        f"'ray[default]=={version}'" in (DEPLOY / "Dockerfile").read_text()
    )  # without the extra, Ray does not answer KubeRay's probes


def test_the_image_has_what_its_installation_reads() -> None:
    script, image = (DEPLOY.parent / "install.sh").read_text(), (DEPLOY / "Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.*) \./", image, re.MULTILINE) for name in line.split()}
    assert "sh install.sh" in image
    assert set(re.findall(r"\$checkout/([\w.]+)", script)) <= copied
    (names,) = re.findall(r"for name in (.*); do cp", script)
    assert set(names.split()) <= copied


def test_the_service_gives_the_server_time_to_finish_its_requests() -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "paceline.service")
    service = unit["Service"]
    assert service["KillMode"] == "mixed", "the engine would drain while the gateway still sends it tokens to generate"
    assert float(service["TimeoutStopSec"]) > ServerConfig().drain_timeout + GRACE
    assert service["ExecStart"] == "/usr/local/bin/paceline serve"
    settings = re.findall(r"PACELINE_\w+(?==[/0…])", (DEPLOY / "paceline.service").read_text())
    known = {setting.variable for setting in SETTINGS.values()}
    assert set(settings) - {"PACELINE_HOME", "PACELINE_BIN"} <= known
