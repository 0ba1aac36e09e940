"""The autograd graph of a model, as bert.dot: pip install torchviz; --model drawn:bert"""

import os

import hf
import torchviz


def bert(device):
    model, inputs, loss = hf.bert(device)
    if os.environ["RANK"] == "0":
        graph = torchviz.make_dot(loss(model(*inputs)), dict(model.named_parameters()), True, True)
        graph.save("bert.dot")
    return model, inputs, loss
