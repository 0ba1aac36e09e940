"""launch/kubernetes and launch/Dockerfile against the published schemas, and for what they mean.

kubernetes-validate carries the schemas of Kubernetes; kubeflow-trainer-api is Kubeflow's own model
of the Trainer resources. There is no cluster here: nothing is run, and no image is built.
"""

import copy
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from harness import ROOT, SCRIPTS, run
from kubeflow_trainer_api import models
from pydantic import ValidationError

FOLDER = ROOT / "launch" / "kubernetes"
VERSION = "1.32"  # of the Kubernetes schemas
TRAINER = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}
needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="needs kubectl, to render with kustomize"
)
BASES = ("job", "trainjob")


def load(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def render(folder: Path) -> dict[str, dict[str, Any]]:
    """What `kubectl apply -k` would send, by kind."""
    done = run(["kubectl", "kustomize", str(folder)])
    assert done.returncode == 0, done.stderr
    return {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}


def validate(document: dict[str, Any]) -> None:
    """Raises kubernetes_validate.ValidationError, pydantic's, or ValueError for what is unknown."""
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


PIECES = [
    pytest.param(document, id=f"{path.parent.name}-{document['kind']}")
    for path in sorted(FOLDER.glob("*/*.yaml"))
    if path.name != "kustomization.yaml"
    for document in load(path)
]


def test_there_are_pieces() -> None:
    kinds = {piece.values[0]["kind"] for piece in PIECES}  # type: ignore[index]
    assert kinds == {"Job", "Service", "TrainJob", "TrainingRuntime"}


@pytest.mark.parametrize("document", PIECES)
def test_pieces_are_of_their_schema(document: dict[str, Any]) -> None:
    validate(document)


@pytest.mark.parametrize("document", PIECES)
def test_the_check_above_can_fail(document: dict[str, Any]) -> None:
    """A misspelled name, deep down; and a value of the wrong type."""
    misspelled, mistyped = copy.deepcopy(document), copy.deepcopy(document)
    for changed, kind in ((misspelled, "name"), (mistyped, "type")):
        spec = changed["spec"]
        if changed["kind"] in ("Job", "TrainingRuntime"):
            while "template" in spec or "replicatedJobs" in spec:
                spec = spec["template"] if "template" in spec else spec["replicatedJobs"][0]
                spec = spec.get("spec", spec)
            spec = spec["containers"][0]
        if changed["kind"] == "TrainJob":
            spec = spec["trainer"]
        if kind == "name":
            spec["imagee"] = "x"
        else:
            spec["ports" if changed["kind"] == "Service" else "command"] = 7
        with pytest.raises((kubernetes_validate.ValidationError, ValidationError, ValueError)):
            validate(changed)


@pytest.mark.parametrize("base", BASES)
def test_the_edits_are_in_one_place(base: str) -> None:
    """The kustomization's patches name image, script and sizes, of what exists."""
    (kustomization,) = load(FOLDER / base / "kustomization.yaml")
    assert sorted(kustomization["resources"]) == sorted(
        path.name for path in (FOLDER / base).glob("*.yaml") if path.name != "kustomization.yaml"
    )
    (patch,) = [yaml.safe_load(entry["patch"]) for entry in kustomization["patches"]]
    pieces = [piece.values[0] for piece in PIECES]
    names = {(piece["kind"], piece["metadata"]["name"]) for piece in pieces}  # type: ignore[index]
    assert (patch["kind"], patch["metadata"]["name"]) in names
    text = yaml.safe_dump(patch)
    assert "image: registry.example.com/torchrun-bench:1" in text
    assert "benchmarks/ddp_sweep.py" in text
    assert "nvidia.com/gpu: 8" in text


@needs_kubectl
def test_the_job_as_a_whole() -> None:
    documents = render(FOLDER / "job")
    for document in documents.values():
        validate(document)
    check_job(documents)


def check_job(documents: dict[str, dict[str, Any]]) -> None:
    """What the schema does not say: names, labels and numbers that have to agree."""
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


def check_pod(pod: dict[str, Any]) -> None:
    """A /dev/shm of its own, and a script that exists."""
    (container,) = pod["containers"]
    (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert volume["emptyDir"]["sizeLimit"]


@needs_kubectl
def test_the_check_of_the_job_can_fail() -> None:
    documents = render(FOLDER / "job")
    for old, new in (
        ("subdomain: torchrun-bench", "subdomain: other"),
        ("clusterIP: None", "clusterIP: 10.0.0.1"),
        ("--master-addr=torchrun-bench-0", "--master-addr=torchrun-bench-1"),
        ("port: 29400", "port: 29500"),
        ("parallelism: 2", "parallelism: 1"),
        ("selector:\n    app: torchrun-bench", "selector:\n    app: other"),
        ("mountPath: /dev/shm", "mountPath: /shm"),
        ("value: '8'", "value: '4'"),
        ("publishNotReadyAddresses: true", "publishNotReadyAddresses: false"),
    ):
        text = yaml.safe_dump_all(documents.values())
        assert old in text
        changed = yaml.safe_load_all(text.replace(old, new, 1))
        with pytest.raises((AssertionError, ValueError)):
            check_job({document["kind"]: document for document in changed})


@needs_kubectl
def test_an_edit_reaches_all_that_follows_from_it(tmp_path: Path) -> None:
    """Four nodes of four GPUs, another script, another image: one file is edited."""
    shutil.copytree(FOLDER / "job", tmp_path / "job")
    path = tmp_path / "job" / "kustomization.yaml"
    text = path.read_text().replace("completions: 2", "completions: 4")
    text = text.replace("nvidia.com/gpu: 8", "nvidia.com/gpu: 4")
    text = text.replace("[benchmarks/ddp_sweep.py]", "[benchmarks/collectives.py, -b, 8M]")
    path.write_text(text)
    documents = render(tmp_path / "job")
    check_job(documents)
    assert documents["Job"]["spec"]["parallelism"] == 4
    (container,) = documents["Job"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["benchmarks/collectives.py", "-b", "8M"]
    assert {"name": "RANKS_PER_NODE", "value": "4"} in container["env"]


@needs_kubectl
def test_the_trainjob_as_a_whole() -> None:
    documents = render(FOLDER / "trainjob")
    for document in documents.values():
        validate(document)
    job, runtime = documents["TrainJob"], documents["TrainingRuntime"]
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
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


@pytest.mark.parametrize("base", BASES)
def test_the_script_exists(base: str) -> None:
    found = re.findall(r"benchmarks/\w+\.py", (FOLDER / base / "kustomization.yaml").read_text())
    assert found
    for name in found:
        assert ROOT / name in SCRIPTS


# -- the image -------------------------------------------------------------------------------------


def lint(path: Path) -> subprocess.CompletedProcess[str]:
    return run(["hadolint", "--no-color", str(path)])


def test_dockerfile(tmp_path: Path) -> None:
    done = lint(ROOT / "launch" / "Dockerfile")
    assert done.returncode == 0, done.stdout
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp && apt-get install x\n")
    assert lint(tmp_path / "Dockerfile").returncode != 0


def test_dockerfile_copies_what_exists() -> None:
    text = (ROOT / "launch" / "Dockerfile").read_text()
    sources = [word for line in re.findall(r"^COPY (.+) \S+$", text, re.M) for word in line.split()]
    assert {"benchmarks", "common", "launch", "requirements.txt"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists()
