"""An unrolled LSTM language model: Zaremba, Sutskever, Vinyals 2014, arXiv:1409.2329. The default sizes are those of
the paper's medium network.

For every layer and every position of the sequence, `torch.nn.LSTMCell` is called separately. So rematerialisation can
be decided for each call. As in the paper, dropout is applied to the input of every layer and of the output layer, but
not to the state that a cell gives to the next position.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

DROPOUT = 0.5


class UnrolledLSTM(nn.Module):
    """An unrolled LSTM: a network from token numbers (N, T) to scores of the next token (N, T, ``vocabulary``).

    For every layer and every position of the sequence, `torch.nn.LSTMCell` is called separately. The initial states
    are zero. ``depth``: the number of layers. ``width``: the number of features per token and of a cell's state.
    ``vocabulary``: the number of distinct tokens.
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
