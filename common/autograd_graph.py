"""A picture of the autograd graph, by torchviz, which is optional."""

import importlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

PICTURES = (".svg", ".pdf", ".png")  # drawn by graphviz's `dot`
SOURCES = (".dot", ".gv")  # what `dot` reads
INSTALL = "pip install torchviz"
INSTALL_DOT = "apt-get install graphviz"


def check_graph_path(path: str) -> None:
    """Raise ValueError, with what to do, where `write_graph` could not write to `path`."""
    _torchviz()
    target = Path(path)
    if target.suffix not in (*PICTURES, *SOURCES):
        raise ValueError(
            f"the graph's file needs a name that ends in {', '.join((*PICTURES, *SOURCES))}, "
            f"got '{path}'; e.g. graph.svg"
        )
    if target.suffix in PICTURES and shutil.which("dot") is None:
        raise ValueError(
            f"{path}: graphviz's program dot is not installed; {INSTALL_DOT}, or take a name that "
            "ends in .dot"
        )
    try:
        if target.exists() and not target.is_file():
            raise ValueError(f"{path} is not a regular file; give one, e.g. graph.svg")
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            pass
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None


def write_graph(loss: torch.Tensor, model: nn.Module, path: str) -> None:
    """Draw what `loss.backward()` would walk through, the model's parameters by their names.

    loss: a scalar that the model computed with gradients on. path: its ending says what is
    written. Raises ValueError without torchviz, graphviz or a place to write.
    """
    check_graph_path(path)
    graph = _torchviz().make_dot(
        loss, params=dict(model.named_parameters()), show_attrs=True, show_saved=True
    )
    target = Path(path)
    if target.suffix in SOURCES:
        content = str(graph.source).encode()
    else:
        try:
            content = graph.pipe(format=target.suffix.removeprefix("."))
        except Exception as error:  # of the package graphviz: `dot` failed
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{path}: dot could not draw the graph: {line}") from None
    try:
        target.write_bytes(content)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None


def _torchviz() -> Any:
    try:
        return importlib.import_module("torchviz")
    except ImportError as error:
        missing = error.name or "torchviz"
        raise ValueError(
            f"the autograd graph needs the package torchviz, and {missing} is not installed; "
            f"{INSTALL}, and {INSTALL_DOT} for its program dot"
        ) from None
