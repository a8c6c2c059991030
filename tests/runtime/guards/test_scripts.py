"""A law of scripts and notebooks, where the loop's variables stand beside the model's class: what the loop does costs
no further plan, whatever its variables are called."""

import runpy
from pathlib import Path

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F

import rematplan

settings = {"slope": 2.0}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.x, self.y, self.out = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)
        self.loss, self.step, self.i, self.mask, self.lr, self.epoch = nn.GELU(), 0.5, 1, None, 1.0, 2

    def forward(self, h, mask=None):
        r = self.loss(self.y(self.x(h))) * self.step * self.lr + self.i * self.epoch
        return h + helper(self.out(r)) * settings["slope"]


def helper(z):
    total = z.mean()
    return z - total


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.model, self.batch = nn.ModuleList(Block(16) for _ in range(2)), None

    def forward(self, idx, labels=None):
        x, loss = self.emb(idx), None
        for b in self.model:
            x = b(x)
        logits = self.head(x)
        if labels is not None:
            loss = F.cross_entropy(logits.view(-1, 11), labels.view(-1))
        return logits, loss


idx = torch.randint(0, 11, (2, 5))
x = y = loss = step = mask = i = lr = epoch = out = emb = head = b = h = None  # as an earlier run leaves them
model = rematplan.plan_module(
    Language(), (idx,), {"labels": idx}, budget="100%", strategy="store_all", costs="roofline", dynamic_shapes=False
)
opt = torch.optim.Adam(model.parameters())
total, history = 0, []
for epoch in range(2):
    for step in range(3):
        batch = torch.randint(0, 11, (2, 5))
        x = y = labels = batch
        mask, i, lr, b = torch.ones(2), step, 1e-3 * step, None
        opt.zero_grad()
        out, loss = model(x, labels=y)
        logits = h = emb = out
        loss.backward()
        opt.step()
        total += loss.item()
        history.append(total)
        r, z, head = total, 3, history
"""


def test_variables_of_the_loop_are_not_what_the_model_has(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    found = runpy.run_path(str(file))
    assert len(found["history"]) == 6
    assert len(found["model"].plans) == 1
