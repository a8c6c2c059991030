"""An unrolled LSTM language model: Zaremba, Sutskever, Vinyals 2014, arXiv:1409.2329 (its medium network).

Every step of every layer is a separate cell in the graph, so that each can be planned. Dropout is applied between
layers, not between steps, as in the paper.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

DROPOUT = 0.5


class UnrolledLSTM(nn.Module):
    """An unrolled LSTM: a network from token numbers (N, T) to scores of the next token (N, T, ``vocabulary``).

    Each step of each layer is a separate cell. The initial state is zero. ``depth``: the number of layers. ``width``:
    the features of a token and of the state. ``vocabulary``: the number of distinct tokens.
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
