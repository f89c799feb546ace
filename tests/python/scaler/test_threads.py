# SPDX-License-Identifier: Apache-2.0
"""Separate scalers in separate threads."""

import threading

import torch

import fastamp


def test_separate_scalers_work_in_separate_threads():
    failures = []

    def train(seed):
        try:
            generator = torch.Generator().manual_seed(seed)
            parameters = [torch.nn.Parameter(torch.zeros(5)) for _ in range(50)]
            optimizer = torch.optim.SGD(parameters, lr=1.0)
            scaler = fastamp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
            reference = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
            scaler.scale(torch.ones(())), reference.scale(torch.ones(()))
            for step in range(100):
                for parameter in parameters:
                    parameter.grad = torch.randn(5, generator=generator)
                if step % 7 == seed % 7:
                    parameters[step % 50].grad[2] = float("inf")
                for each in (reference, scaler):
                    each.unscale_(optimizer)
                    each.update()
                assert scaler.state_dict() == reference.state_dict()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
