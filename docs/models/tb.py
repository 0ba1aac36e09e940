"""Models of torchbench, any name works: install pytorch/benchmark; --model tb:hf_Bert"""

import importlib

from torch._dynamo.testing import reduce_to_scalar_loss


def __getattr__(name):
    def make(device):
        models = importlib.import_module(f"torchbenchmark.models.{name}")
        model, inputs = models.Model(test="train", device=str(device)).get_module()
        return model, tuple(inputs), reduce_to_scalar_loss

    if name.startswith("__"):
        raise AttributeError(name)
    return make
