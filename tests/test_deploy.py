"""The files of deploy/ against what they speak of: routes, metrics, options and targets of the image."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from lightkv.router.api.metrics import ServiceMetrics
from lightkv.router.cli.app import app
from lightkv.router.config import API_KEY_VARIABLE, METRICS_KEY_VARIABLE
from lightkv.router.engine.step import Limits, RunnerInfo
from lightkv.router.service.messages import Load, Status
from lightkv.router.service.router_client import LatestStatus

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose"
ROUTES = re.findall(r'Route\("GET", "([^"]+)"', (ROOT / "router" / "api" / "routes.py").read_text())
METRIC = re.compile(r"\b(?:vllm|lightkv):\w+")
READY = Status(
    "ready",
    "ready",
    Load(capacity=8),
    RunnerInfo(
        architecture="LlamaForCausalLM",
        device="cpu",
        dtype="float32",
        attention_backend="torch",
        cuda_graphs=False,
        capacity=8,
        bytes_per_token=4,
        pool_bytes=32,
        pool_reason="given",
        limits=Limits(max_num_seqs=1, max_model_len=8, prefill_chunk=4, vocab_size=16),
    ),
)


def documents(file: Path) -> list[Any]:
    return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))


def of_kind(kind: str) -> Any:
    (found,) = (one for one in documents(DEPLOY / "kubernetes.yaml") if one["kind"] == kind)
    return found


@pytest.fixture(scope="module")
def series() -> set[str]:
    """The names of all series that a service has."""
    metrics = ServiceMetrics("m", lambda: LatestStatus(READY, 0.0))
    metrics.finished.labels("m", "stop")
    lines = metrics.text().decode().splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


def options_of(args: list[str]) -> dict[str, Any]:
    """What `lightkv serve` understands of its arguments; fails for an option that there is not."""
    group: Any = get_command(app)
    name, command, rest = group.resolve_command(group.make_context("lightkv", ["serve"]), ["serve", *args])
    return dict(command.make_context(name, rest).params)


@pytest.mark.parametrize("file", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: path.name)
def test_every_file_parses_and_says_what_it_is(file: Path) -> None:
    assert file.read_text(encoding="utf-8").startswith("# ")
    assert all(isinstance(document, dict) for document in documents(file))


def test_the_probes_ask_routes_that_there_are() -> None:
    (container,) = of_kind("Deployment")["spec"]["template"]["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    probes = {name: container[name]["httpGet"] for name in container if name.endswith("Probe")}
    assert probes.keys() == {"startupProbe", "readinessProbe", "livenessProbe"}
    for probe in probes.values():
        assert probe["path"] in ROUTES
        assert probe["port"] in ports
    assert probes["readinessProbe"]["path"] == "/ready"
    assert probes["livenessProbe"]["path"] == "/health"


def test_a_pod_has_a_model_its_resources_and_the_keys() -> None:
    (container,) = of_kind("Deployment")["spec"]["template"]["spec"]["containers"]
    assert "/" in options_of(container["args"])["model"]
    resources = container["resources"]
    assert resources["limits"].keys() == {"memory", "nvidia.com/gpu"}
    assert resources["requests"].keys() == {"cpu", "memory"}
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    (source,) = container["envFrom"]
    assert f"kubectl create secret generic {source['secretRef']['name']} " in text
    assert re.findall(r"--from-literal=(\w+)=", text)[0] == API_KEY_VARIABLE


def test_an_update_needs_no_further_gpu() -> None:
    deployment = of_kind("Deployment")["spec"]
    assert deployment["strategy"] == {"rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}
    assert deployment["replicas"] > 1  # so that the others serve meanwhile


def test_a_pod_has_the_time_to_drain() -> None:
    pod = of_kind("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    _, before = container["lifecycle"]["preStop"]["exec"]["command"]
    drain = options_of(container["args"])["shutdown_timeout"]
    assert int(before) + drain < pod["terminationGracePeriodSeconds"]


def test_the_pods_are_those_of_the_service_and_tell_where_their_metrics_are() -> None:
    template = of_kind("Deployment")["spec"]["template"]
    selector = of_kind("Service")["spec"]["selector"]
    assert selector.items() <= template["metadata"]["labels"].items()
    assert of_kind("Deployment")["spec"]["selector"]["matchLabels"] == selector
    annotations = template["metadata"]["annotations"]
    (container,) = template["spec"]["containers"]
    assert annotations["prometheus.io/path"] in ROUTES
    assert int(annotations["prometheus.io/port"]) == container["ports"][0]["containerPort"]


def test_the_compose_files_mount_what_there_is_and_build_targets_that_there_are() -> None:
    targets = re.findall(r"^FROM .* AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for name in ("compose.yaml", "cuda.yaml"):
        (compose,) = documents(COMPOSE / name)
        assert compose["services"]["lightkv"]["build"]["target"] in targets
        for service in compose["services"].values():
            for volume in service.get("volumes", []):
                source = volume.split(":")[0]
                assert source in compose["volumes"] or (COMPOSE / source).is_file(), volume
    (compose,) = documents(COMPOSE / "compose.yaml")
    service = compose["services"]["lightkv"]
    assert (COMPOSE / service["build"]["context"]).resolve() == ROOT
    assert options_of(service["command"])["shutdown_timeout"] < int(
        service["stop_grace_period"].removesuffix("s")
    )
    (prometheus,) = documents(COMPOSE / "prometheus.yaml")
    (job,) = prometheus["scrape_configs"]
    assert job["metrics_path"] in ROUTES
    (config,) = compose["services"]["prometheus"]["configs"]
    assert job["authorization"] == {"credentials_file": config["target"]}
    metrics_key = compose["configs"][config["source"]]["content"]
    assert metrics_key == f"${{{METRICS_KEY_VARIABLE}:-none}}"
    assert service["environment"] == {
        name: f"${{{name}:-}}" for name in (API_KEY_VARIABLE, METRICS_KEY_VARIABLE)
    }
    assert job["static_configs"] == [{"targets": ["lightkv:8000"]}]


def test_ranks_have_shared_memory_for_nccl() -> None:
    """Docker and Kubernetes give 64 MiB by default, at which NCCL fails on GPUs without links."""
    (compose,) = documents(COMPOSE / "cuda.yaml")
    assert compose["services"]["lightkv"]["shm_size"] == "1gb"
    pod = of_kind("Deployment")["spec"]["template"]["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes[mounts["/dev/shm"]] == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_the_dashboard_asks_for_series_that_there_are(series: set[str]) -> None:
    dashboard = json.loads((COMPOSE / "grafana" / "lightkv.json").read_text(encoding="utf-8"))
    (sources,) = documents(COMPOSE / "grafana" / "datasources.yaml")
    known = {source["uid"] for source in sources["datasources"]}
    assert len(dashboard["panels"]) > 5
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] in known
        for target in panel["targets"]:
            names = set(METRIC.findall(target["expr"]))
            assert names
            assert names <= series, target["expr"]


def test_the_replicas_of_ray_read_series_and_routes_that_there_are(series: set[str]) -> None:
    text = (DEPLOY / "ray_serve.py").read_text(encoding="utf-8")
    assert set(METRIC.findall(text)) <= series
    assert {"/ready", "/metrics"} == set(re.findall(r'_ask\("(/\w+)"\)', text)) <= set(ROUTES)


def test_the_manifest_speaks_of_series_that_there_are(series: set[str]) -> None:
    lines = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8").splitlines()
    names = METRIC.findall("\n".join(line for line in lines if line.startswith("#")))
    assert len(names) == 2
    assert set(names) <= series
