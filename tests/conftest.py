"""One torch thread: the suite runs in several processes, which would otherwise fight over the cores."""

import torch

torch.set_num_threads(1)
