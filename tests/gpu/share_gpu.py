"""Run several NCCL ranks on one GPU: share_gpu.py [tests/inject.py FAULT] SCRIPT FLAGS...

    torchrun --nproc-per-node 2 tests/gpu/share_gpu.py benchmarks/ddp_sweep.py --iters 12

NCCL up to 2.29 refuses two ranks with the same host and the same GPU ("Duplicate GPU detected",
ncclCommInitRank in init.cc). NCCL_HOSTID makes each rank a separate host (getHostHash in utils.cc).
The ranks then communicate over sockets on loopback, like nodes with one GPU each. NCCL 2.30 allows
two ranks on a GPU if NCCL_MULTI_RANK_GPU_ENABLE=1. The scripts allow it, too, if that is set.

The ranks take turns on the GPU. So this tests that the code of several NCCL ranks runs and computes
the right values. Its times mean nothing.
"""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    script = Path(sys.argv[0]).resolve()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
    os.environ["NCCL_HOSTID"] = f"rank{os.environ['RANK']}"
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_MAX_CTAS", "2")  # leaves most of the GPU to the other ranks
    if script.parent.name == "examples":  # an example uses cuda:LOCAL_RANK
        os.environ["LOCAL_RANK"] = "0"
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")
