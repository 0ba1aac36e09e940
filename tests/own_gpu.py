"""Run a script with one visible GPU for each rank, like Slurm's --gpus-per-task.

torchrun --nproc-per-node 2 tests/own_gpu.py SCRIPT FLAGS...
"""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
    runpy.run_path(sys.argv[0], run_name="__main__")
