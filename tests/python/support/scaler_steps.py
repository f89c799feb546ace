# SPDX-License-Identifier: Apache-2.0
"""A small model whose gradients are given by hand."""

import torch

INF, NAN = float("inf"), float("nan")


def model_and_optimizer(kind=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    return model, kind(model.parameters(), lr=0.1, **options)


def give_gradients(model, bad=None):
    """Gradients of 1; ``bad`` maps a parameter's name to the values its first elements get."""
    for name, parameter in model.named_parameters():
        parameter.grad = torch.ones_like(parameter)
        for i, value in enumerate((bad or {}).get(name, ())):
            parameter.grad.view(-1)[i] = value


def step(scaler, model, optimizer, bad=None):
    scaler.scale(torch.ones(()))
    give_gradients(model, bad)
    scaler.step(optimizer)
    scaler.update()
