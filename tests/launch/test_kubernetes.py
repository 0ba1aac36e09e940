"""launch/kubernetes: valid against the published schemas, and consistent in itself.

kubectl renders the documents that `kubectl apply -k` would send, and kubernetes-validate checks
them against the schemas of Kubernetes. The test needs no cluster, and starts no pod.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from tests.launch.lab import need
from tests.process import ROOT

pytestmark = pytest.mark.launch

FOLDER = ROOT / "launch" / "kubernetes"
VERSION = "1.32"  # of the Kubernetes schemas


def render(folder: Path) -> dict[str, dict[str, Any]]:
    """The documents that kubectl would send, validated, by kind."""
    need("kubectl")
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    documents = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    for document in documents.values():
        kubernetes_validate.validate(document, VERSION, strict=True)
    return documents


@pytest.mark.parametrize(("nodes", "gpus"), [(2, 8), (4, 4)])
def test_job(tmp_path: Path, nodes: int, gpus: int) -> None:
    """After an edit of kustomization.yaml alone, all names, labels and numbers agree."""
    shutil.copytree(FOLDER, tmp_path / "job")
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
    # DNS name of a pod: job name and index, then the headless Service, which selects the pods
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
    # /dev/shm is a volume in memory, with a size limit
    (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm"]
    (volume,) = [v for v in pod["volumes"] if v["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert volume["emptyDir"]["sizeLimit"]
