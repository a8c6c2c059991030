"""Small networks for statistics, and what they are called with."""

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp() -> tuple[nn.Module, Tensor]:
    layers = [
        m for _ in range(2) for m in (nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 6, bias=False), nn.GELU())
    ]
    return nn.Sequential(*layers, nn.Linear(6, 4)), torch.randn(700, 6)


def cnn() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, stride=2, groups=2, padding=(1, 0)),
        nn.GELU(),
        nn.Conv2d(6, 4, 2, dilation=2, bias=False),
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.GELU(),
        nn.Conv2d(6, 3, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(3, 4),
    ), torch.randn(5, 2, 9, 8)


def lines() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2, padding=2), nn.Tanh(), nn.ConvTranspose1d(4, 3, 4, stride=3, padding=2)
    ), torch.randn(4, 2, 7)


def volumes() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(
        nn.Conv3d(1, 2, 2, padding=1),
        nn.Tanh(),
        nn.ConvTranspose3d(2, 2, 2, stride=(1, 2, 1), dilation=(1, 1, 2)),
    ), torch.randn(3, 1, 3, 3, 4)


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(n, t, 2, d // 2).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, d))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, d: int = 8, blocks: int = 2, words: int = 11) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, d), nn.Parameter(torch.randn(6, d) * 0.1)
        self.blocks = nn.Sequential(*(Block(d) for _ in range(blocks)))
        self.head = nn.Linear(d, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(tokens) + self.places))


def gpt() -> tuple[nn.Module, Tensor]:
    return GPT(blocks=1), torch.randint(0, 11, (4, 6))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


def attention() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Attention(), Attention(), nn.Linear(8, 4)), torch.randn(6, 5, 8)


MODELS = {"mlp": mlp, "cnn": cnn, "lines": lines, "volumes": volumes, "gpt": gpt, "attention": attention}
