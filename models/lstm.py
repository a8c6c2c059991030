"""An unrolled LSTM language model (Zaremba et al. 2014, arXiv:1409.2329), with the medium network's sizes and
dropout.

Each layer and position is a call of `torch.nn.LSTMCell`, so rematerialisation is decided for each.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

DROPOUT = 0.5


class UnrolledLSTM(nn.Module):
    """An unrolled LSTM: from token numbers (N, T) to scores of the next token (N, T, ``vocabulary``). Initial
    states are zero.
    """

    def __init__(self, depth: int = 2, width: int = 650, vocabulary: int = 10000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(depth))
        self.dropout = nn.Dropout(DROPOUT)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of the next token, (N, T, ``vocabulary``), for token numbers (N, T)."""
        embedded = self.dropout(self.embedding(tokens))
        zero = torch.zeros_like(embedded[:, 0])
        states, outputs = [(zero, zero)] * len(self.cells), []
        for x in embedded.unbind(1):
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(x, states[layer])
                x = self.dropout(states[layer][0])
            outputs.append(x)
        return cast(Tensor, self.head(torch.stack(outputs, dim=1)))
