"""A Laplace approximation from the statistics of a planned step: how certain a network is, within its data and
beyond.

The posterior of the weights is a normal distribution around the trained weights with precision F + τ I. F is the
Fisher matrix of all data, (G / samples) ⊗ (A / rows) times the number of samples (Ritter, Botev and Barber 2018). The
eigenvectors of both factors give the variance of predictions without computing F. `laplace-torch` (its ``Kron``),
`curvlinops` and others use the same two factors for each layer; `rematplan.runtime.statistics.factors` states the
scale of the factors here.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import rematplan

NOISE, PRIOR = 0.1, 1.0


class Posterior:
    """A normal distribution of a model's weights around their present values, from the curvature for the data ``x``."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model = model
        statistics = rematplan.Kronecker(fisher="type-2", likelihood="gaussian", loss_reduction="sum")
        planned = rematplan.plan_module(
            model, (x,), budget="1GiB", statistics=statistics, strategy=rematplan.Auto(time_limit=2)
        )
        planned(
            x
        ).sum().backward()  # any loss works: the Hessian of a Gaussian likelihood does not depend on targets
        self.layers = rematplan.planning(planned).statistics().factors
        model.zero_grad()

    def deviation(self, x: Tensor) -> Tensor:
        """Return the standard deviation of each prediction for ``x`` (samples, 1), with the model linearised in its
        weights."""
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        slopes = jacrev(lambda now: functional_call(self.model, now, (x,))[:, 0])(parameters)
        variance = torch.zeros(len(x))
        for name, factors in self.layers.items():
            outputs, q_out = torch.linalg.eigh(factors.g / (2 * NOISE**2))  # of |y − t|² / (2 noise²)
            inputs, q_in = torch.linalg.eigh(factors.a / factors.rows)
            precision = outputs.clamp(min=0)[:, None] * inputs.clamp(min=0) + PRIOR
            rows = [
                factors.matrix(*pair) for pair in zip(slopes[name], slopes[factors.bias_name], strict=True)
            ]
            variance += ((q_out.T @ torch.stack(rows) @ q_in) ** 2 / precision).sum((1, 2))
        return variance.sqrt()


torch.manual_seed(0)
inside = torch.cat([torch.linspace(-2, -0.7, 150), torch.linspace(0.7, 2, 150)])[:, None]
targets = torch.sin(3 * inside) + NOISE * torch.randn_like(inside)
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(800):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inside), targets)
    loss.backward()
    optimizer.step()
posterior = Posterior(model, inside)
sure, between, beyond = (
    float(posterior.deviation(x).mean())
    for x in (inside, torch.linspace(-0.3, 0.3, 20)[:, None], torch.linspace(3, 4, 20)[:, None])
)
print(f"mean squared error {loss.item():.4f} (noise alone {NOISE**2:.4f})")
print(
    f"deviation of predictions: inside of the data {sure:.3f}, in its gap {between:.3f}, beyond it {beyond:.3f}"
)
assert between > 1.5 * sure
assert beyond > 1.5 * sure
