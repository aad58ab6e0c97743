"""The smallest whole script: every rank a replica.

torchrun --nproc-per-node 2 examples/minimal.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import edit

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")  # before the optimizer
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
if torch.cuda.is_available():
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model.cuda()

# Every rank must see data of its own.
inputs = torch.randn(4096, 8)
dataset = TensorDataset(inputs, inputs.prod(dim=1, keepdim=True))
loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))

# A warning may say that a replica was left out of a round: its pseudo gradient was out of the ordinary.
optimizer = edit.LocalSGDOptimizer(model, lr=3e-3, schedule=edit.EverySteps(16, warmup_steps=16))
for epoch in range(10):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x.to(model[0].weight.device)), y.to(model[0].weight.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
optimizer.sync()  # all replicas meet: now all hold the same model

if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f} after {optimizer.total_steps} steps and {optimizer.rounds} rounds")
optimizer.close()
dist.destroy_process_group()
