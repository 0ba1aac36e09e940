"""A contrastive loss, which gathers the batch of all ranks as CLIP does: --model towers:towers."""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, normalize


class Towers(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.image, self.text = torch.nn.Linear(1024, width), torch.nn.Linear(512, width)

    def forward(self, images, texts):
        return normalize(self.image(images)), normalize(self.text(texts))


def contrast(output):
    images, texts = output
    every = [torch.empty_like(texts) for _ in range(dist.get_world_size())]
    dist.all_gather(every, texts.detach())
    every[dist.get_rank()] = texts  # with its gradient
    targets = dist.get_rank() * len(texts) + torch.arange(len(texts), device=texts.device)
    return cross_entropy(images @ torch.cat(every).T / 0.07, targets)


def towers(device, batch=256, width=512):
    inputs = (torch.randn(batch, 1024, device=device), torch.randn(batch, 512, device=device))
    return Towers(width).to(device), inputs, contrast
