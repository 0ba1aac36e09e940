"""Load cudalab. Python imports this file when it starts, because env.sh adds it to PYTHONPATH.

It loads cudalab's libraries before torch loads NVIDIA's. The dynamic linker then uses them instead
of the libraries of the same name in torch's RPATH. After torch is loaded, it loads the extension
that replaces the CUDA kernels.
"""

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import cudalab_cover  # type: ignore[import-not-found]  # in this folder

LAB = os.environ.get("CUDALAB", "")
LIBRARIES = (
    *("libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1", "libcupti.so.13", "libnccl.so.2"),
)


class AroundTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch as usual; loads the libraries before its code runs and the extension after it."""

    loader: importlib.abc.Loader

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec and spec.loader:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        for library in LIBRARIES:
            ctypes.CDLL(f"{LAB}/lib/{library}", ctypes.RTLD_GLOBAL)
        module.__loader__ = self.loader
        if module.__spec__:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        module.ops.load_library(f"{LAB}/lib/cudalab_ops.so")
        cudalab_cover.follow_rpc()
        if patch := os.environ.get("CUDALAB_PATCH"):
            exec(compile(Path(patch).read_text(), patch, "exec"), {})


if LAB:
    if setting := os.environ.get("CUDALAB_COVER"):
        cudalab_cover.start(setting)
    sys.meta_path.insert(0, AroundTorch())
