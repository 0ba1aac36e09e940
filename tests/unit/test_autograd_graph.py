"""common/autograd_graph.py, with a stand-in for torchviz."""

import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from common.autograd_graph import check_graph_path, write_graph


@pytest.fixture
def torchviz(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """torchviz, graphviz and `dot` are there; what make_dot got."""
    got: dict[str, Any] = {}

    def pipe(format: str) -> bytes:
        if got.get("broken"):
            raise RuntimeError("dot: cannot draw\nmore")
        return b"a picture as " + format.encode()

    def make_dot(var: torch.Tensor, **options: Any) -> Any:
        assert var.grad_fn is not None
        got.update(options)
        return SimpleNamespace(source="digraph {}", pipe=pipe)

    module = ModuleType("torchviz")
    module.make_dot = make_dot  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchviz", module)
    monkeypatch.setattr(shutil, "which", lambda name: None if got.get("no dot") else f"/bin/{name}")
    return got


def draw(path: Path) -> None:
    model = nn.Linear(2, 1)
    write_graph(model(torch.ones(1, 2)).sum(), model, str(path))


@pytest.mark.parametrize(
    ("name", "content"),
    [("a b.svg", b"a picture as svg"), ("g.pdf", b"a picture as pdf"), ("g.dot", b"digraph {}")],
)
def test_drawing(tmp_path: Path, torchviz: dict[str, Any], name: str, content: bytes) -> None:
    draw(tmp_path / name)
    assert (tmp_path / name).read_bytes() == content
    assert list(tmp_path.iterdir()) == [tmp_path / name]
    assert list(torchviz["params"]) == ["weight", "bias"]
    assert torchviz["show_attrs"]
    assert torchviz["show_saved"]


@pytest.mark.parametrize(
    ("name", "state", "message"),
    [
        ("g.txt", {}, "needs a name that ends in .svg, .pdf, .png, .dot, .gv, got '"),
        ("g.svg", {"no dot": True}, "graphviz's program dot is not installed; apt-get install "),
        ("none/g.svg", {}, "cannot be written: No such file or directory"),
        ("folder.svg", {}, "is not a regular file"),
        ("g.svg", {"broken": True}, "dot could not draw the graph: dot: cannot draw"),
    ],
)
def test_what_cannot_be_drawn(
    tmp_path: Path, torchviz: dict[str, Any], name: str, state: dict[str, bool], message: str
) -> None:
    (tmp_path / "folder.svg").mkdir()
    torchviz.update(state)
    with pytest.raises(ValueError, match=r"graph|written|file") as caught:
        draw(tmp_path / name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_source_needs_no_dot(tmp_path: Path, torchviz: dict[str, Any]) -> None:
    torchviz["no dot"] = True
    draw(tmp_path / "g.gv")


def test_a_full_disk(torchviz: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ValueError, match=r"g\.svg cannot be written: No space left on device"):
        draw(Path("g.svg"))


def test_without_torchviz(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchviz", None)
    with pytest.raises(ValueError, match="pip install torchviz, and apt-get install graphviz"):
        check_graph_path("g.svg")
