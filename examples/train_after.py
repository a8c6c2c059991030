"""`train_before.py` within half of its memory, by three more lines. It prints the same losses, to the last digit."""

import torch
from torch import nn

import rematplan


class Block(nn.Module):
    """A residual block of a mixer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input plus the output of the block's layers."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


torch.manual_seed(0)
batches = [(torch.randn(512, 64), torch.randint(10, (512,))) for _ in range(4)]
model = nn.Sequential(*(Block(64) for _ in range(8)), nn.Linear(64, 10))
model = rematplan.plan_module(model, (batches[0][0],), budget="50%", strategy=rematplan.Auto(time_limit=5))
print(model.plan)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
for epoch in range(3):
    total = 0.0
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: loss {total / len(batches):.9f}")
