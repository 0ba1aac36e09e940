"""launch/kubernetes against the published schemas, and for what has to agree beyond them.

kubernetes-validate carries the schemas of Kubernetes, kubeflow-trainer-api is Kubeflow's model of
its resources, kubectl renders what `kubectl apply -k` would send. There is no cluster here: nothing
is run, and no image is built.
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from kubeflow_trainer_api import models  # type: ignore[import-untyped]

from tests.launch.lab import need
from tests.process import ROOT

pytestmark = pytest.mark.launch

FOLDER = ROOT / "launch" / "kubernetes"
VERSION = "1.32"  # of the Kubernetes schemas
TRAINER = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}

Documents = dict[str, dict[str, Any]]  # by kind


def render(folder: Path) -> Documents:
    """What kubectl would send; all of it is of the schemas."""
    need("kubectl")
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    documents = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    for kind, document in documents.items():
        if kind in TRAINER:
            kept = TRAINER[kind].from_dict(document).to_dict()  # without what it does not know
            assert without_empty(kept) == without_empty(document)
        else:
            kubernetes_validate.validate(document, VERSION, strict=True)
    return documents


def without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: without_empty(inner) for name, inner in value.items()}
        return {name: inner for name, inner in kept.items() if inner not in ({}, [], None)}
    return [without_empty(inner) for inner in value] if isinstance(value, list) else value


def check_shm(pod: dict[str, Any]) -> None:
    """The pod has a /dev/shm of its own, in memory, with a limit."""
    (container,) = pod["containers"]
    (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert volume["emptyDir"]["sizeLimit"]


@pytest.mark.parametrize(("nodes", "gpus"), [(2, 8), (4, 4)])
def test_job(tmp_path: Path, nodes: int, gpus: int) -> None:
    """One file is edited; names, labels and numbers agree."""
    shutil.copytree(FOLDER / "job", tmp_path / "job")
    path = tmp_path / "job" / "kustomization.yaml"
    text = path.read_text().replace("completions: 2", f"completions: {nodes}")
    path.write_text(text.replace("nvidia.com/gpu: 8", f"nvidia.com/gpu: {gpus}"))
    documents = render(tmp_path / "job")
    job, service = documents["Job"], documents["Service"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert env == {"NODES": str(nodes), "RANKS_PER_NODE": str(gpus)}
    assert spec["completions"] == spec["parallelism"] == nodes
    assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
    # a pod's name in DNS: job name and index, then the headless Service, which selects the pods
    assert pod["subdomain"] == service["metadata"]["name"]
    assert (service["spec"]["clusterIP"], spec["completionMode"]) == ("None", "Indexed")
    labels = spec["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    (port,) = service["spec"]["ports"]
    assert container["command"] == [
        *("torchrun", "--nnodes=$(NODES)", "--nproc-per-node=$(RANKS_PER_NODE)"),
        "--node-rank=$(JOB_COMPLETION_INDEX)",  # which Kubernetes sets
        f"--master-addr={job['metadata']['name']}-0.{service['metadata']['name']}",
        f"--master-port={port['port']}",
    ]
    assert (ROOT / container["args"][0]).exists()
    check_shm(pod)


def test_trainjob() -> None:
    documents = render(FOLDER / "trainjob")
    job, runtime = documents["TrainJob"]["spec"], documents["TrainingRuntime"]
    assert job["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["runtimeRef"]["kind"] == "TrainingRuntime"
    trainer = job["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert (ROOT / trainer["args"][0]).exists()
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # by the names `node` and by this label Trainer finds what it has to set
    labels = replicated["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert (replicated["name"], pod["containers"][0]["name"]) == ("node", "node")
    check_shm(pod)


def test_the_image_has_what_the_scripts_need() -> None:
    text = (ROOT / "launch" / "Dockerfile").read_text()
    copied = {word for line in re.findall(r"^COPY (.+) \S+$", text, re.M) for word in line.split()}
    assert copied >= {"benchmarks", "common", "analysis", "launch", "requirements.txt"}
    assert [name for name in copied if not (ROOT / name).exists()] == []
