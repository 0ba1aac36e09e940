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
from pydantic import ValidationError

from tests.launch.lab import need

pytestmark = pytest.mark.launch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "launch" / "kubernetes"
VERSION = "1.32"  # of the Kubernetes schemas
TRAINER = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}
WRONG = (kubernetes_validate.ValidationError, ValidationError, ValueError, AssertionError)

Documents = dict[str, dict[str, Any]]  # by kind


def render(folder: Path) -> Documents:
    need("kubectl")
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}


def validate(document: dict[str, Any]) -> None:
    """Raises one of WRONG for what the schema does not know or has otherwise."""
    if document["apiVersion"].startswith("trainer.kubeflow.org/"):
        # the model drops what it does not know
        kept = TRAINER[document["kind"]].from_dict(document).to_dict()
        if without_empty(kept) != without_empty(document):
            raise ValueError(f"not of the schema: {document} became {kept}")
    else:
        kubernetes_validate.validate(document, VERSION, strict=True)


def without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: without_empty(inner) for name, inner in value.items()}
        return {name: inner for name, inner in kept.items() if inner not in ({}, [], None)}
    return [without_empty(inner) for inner in value] if isinstance(value, list) else value


def check_job(documents: Documents) -> None:
    """Names, labels and numbers that have to agree."""
    for document in documents.values():
        validate(document)
    job, service = documents["Job"], documents["Service"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(env["NODES"])
    assert int(env["RANKS_PER_NODE"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert (spec["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    # a pod's name in DNS: job name and index, then the headless Service, which selects the pods
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    labels = spec["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    options = dict(option[2:].split("=") for option in container["command"][1:])
    assert container["command"][0] == "torchrun"
    assert options["node-rank"] == "$(JOB_COMPLETION_INDEX)"  # which Kubernetes sets
    assert options["master-addr"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert options["nnodes"] == "$(NODES)"
    assert options["nproc-per-node"] == "$(RANKS_PER_NODE)"
    assert [port["port"] for port in service["spec"]["ports"]] == [int(options["master-port"])]
    assert pod["terminationGracePeriodSeconds"] > 30  # torchrun's own patience with its ranks
    check_pod(pod)


def check_trainjob(documents: Documents) -> None:
    for document in documents.values():
        validate(document)
    job, runtime = documents["TrainJob"], documents["TrainingRuntime"]
    wanted = {"apiGroup": "trainer.kubeflow.org", "kind": runtime["kind"]}
    assert job["spec"]["runtimeRef"] == wanted | {"name": runtime["metadata"]["name"]}
    trainer = job["spec"]["trainer"]
    assert trainer["command"] == ["torchrun"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # by these two Trainer finds what it has to set
    assert replicated["name"] == "node"
    labels = replicated["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["name"] == "node"
    check_pod(pod)


def check_pod(pod: dict[str, Any]) -> None:
    """A /dev/shm of its own."""
    (container,) = pod["containers"]
    (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert volume["emptyDir"]["sizeLimit"]


CHECKS = {"job": check_job, "trainjob": check_trainjob}


@pytest.mark.parametrize("base", CHECKS)
def test_as_a_whole(base: str) -> None:
    documents = render(FOLDER / base)
    CHECKS[base](documents)
    (script,) = set(re.findall(r"benchmarks/\w+\.py", yaml.safe_dump_all(documents.values())))
    assert (ROOT / script).exists()


@pytest.mark.parametrize(
    ("base", "old", "new"),
    [
        ("job", "subdomain: torchrun-bench", "subdomain: other"),
        ("job", "--master-addr=torchrun-bench-0", "--master-addr=torchrun-bench-1"),
        ("job", "port: 29400", "port: 29500"),
        ("job", "parallelism: 2", "parallelism: 1"),
        ("job", "value: '8'", "value: '4'"),
        ("job", "restartPolicy:", "restartPolice:"),
        ("job", "sizeLimit: 32Gi", "sizeLimit: [32]"),
        ("trainjob", "mountPath: /dev/shm", "mountPath: /shm"),
        ("trainjob", "numProcPerNode: 8", "numProcPerNode: 4"),
        ("trainjob", "restartPolicy:", "restartPolice:"),
    ],
)
def test_the_checks_can_fail(base: str, old: str, new: str) -> None:
    text = yaml.safe_dump_all(render(FOLDER / base).values())
    assert old in text
    changed = yaml.safe_load_all(text.replace(old, new, 1))
    with pytest.raises(WRONG):
        CHECKS[base]({document["kind"]: document for document in changed})


def test_one_file_is_edited(tmp_path: Path) -> None:
    """Four nodes of four GPUs, another script: all that follows from it follows."""
    shutil.copytree(FOLDER / "job", tmp_path / "job")
    path = tmp_path / "job" / "kustomization.yaml"
    text = path.read_text().replace("completions: 2", "completions: 4")
    text = text.replace("nvidia.com/gpu: 8", "nvidia.com/gpu: 4")
    path.write_text(text.replace("[benchmarks/ddp_sweep.py]", "[benchmarks/x.py, -b, 8M]"))
    documents = render(tmp_path / "job")
    check_job(documents)
    assert documents["Job"]["spec"]["parallelism"] == 4
    (container,) = documents["Job"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["benchmarks/x.py", "-b", "8M"]


def test_the_image_has_what_the_scripts_need() -> None:
    text = (ROOT / "launch" / "Dockerfile").read_text()
    copied = {word for line in re.findall(r"^COPY (.+) \S+$", text, re.M) for word in line.split()}
    assert copied >= {"benchmarks", "common", "analysis", "launch", "requirements.txt"}
    assert [name for name in copied if not (ROOT / name).exists()] == []
