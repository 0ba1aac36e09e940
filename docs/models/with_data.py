"""A model and its dataset: input_sweep.py --model with_data:net --dataset with_data:data"""

import torch


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return {"x": torch.randn(512), "label": index % 10}


class Net(torch.nn.Linear):
    def forward(self, x, label):
        return torch.nn.functional.cross_entropy(super().forward(x), label)


def net(device, batch=32):
    x = torch.randn(batch, 512, device=device)
    label = torch.zeros(batch, dtype=torch.long, device=device)
    return Net(512, 10).to(device), {"x": x, "label": label}, lambda loss: loss


def data():
    return Data()
