"""A vision transformer of timm (pip install timm), whose batch is one dict: --model vit:vit."""

import timm
import torch
from torch.nn.functional import cross_entropy


class Classifier(torch.nn.Module):
    def __init__(self, name, pixels):
        super().__init__()
        self.model = timm.create_model(name, num_classes=10, img_size=pixels)

    def forward(self, batch):
        return cross_entropy(self.model(batch["image"]), batch["label"])


def adamw(parameters):
    """Weight decay for matrices only."""
    matrices, others = [], []
    for parameter in parameters:
        (matrices if parameter.ndim > 1 else others).append(parameter)
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, weight_decay=0.05)


def vit(device, name="vit_tiny_patch16_224", batch=32, pixels=224):
    images = torch.randn(batch, 3, pixels, pixels, device=device)
    inputs = {"image": images, "label": torch.randint(10, (batch,), device=device)}
    model = Classifier(name, pixels).to(device)
    return {"model": model, "args": (inputs,), "loss": lambda loss: loss, "optimizer": adamw}
