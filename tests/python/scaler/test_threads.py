# SPDX-License-Identifier: Apache-2.0
"""Separate scalers in separate threads, and what threads share without knowing of it."""

import queue
import threading
from collections.abc import Callable

import torch

import fastamp


def train_on_threads(train: Callable[[int], None]) -> None:
    """Calls a function on four threads at once, with a number each; none of them may raise."""
    failures: list[BaseException] = []

    def watched(seed: int) -> None:
        try:
            train(seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=watched, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_separate_scalers_work_in_separate_threads():
    def train(seed):
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

    train_on_threads(train)


def test_optimizers_that_another_thread_lets_go_of_count_and_are_forgotten():
    handed = queue.SimpleQueue()

    def let_go():
        while handed.get() is not None:
            pass

    other = threading.Thread(target=let_go)
    other.start()
    scaler = fastamp.GradScaler("cpu", init_scale=2.0, growth_interval=1000)
    scaler.scale(torch.ones(()))
    own = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([own], lr=1.0)
    try:
        for step in range(300):
            for overflows in (False, step % 3 == 0, False):
                parameter = torch.nn.Parameter(torch.zeros(2))
                parameter.grad = torch.full((2,), float("inf") if overflows else 2.0)
                passing = torch.optim.SGD([parameter], lr=1.0)
                scaler.unscale_(passing)
                handed.put(passing)
                del passing
            own.grad = torch.full((3,), 2.0)
            scaler.step(optimizer)
            assert scaler.get_scale() == 2.0
            scaler.update(2.0)
            assert scaler.step_was_skipped == (step % 3 == 0)
    finally:
        handed.put(None)
        other.join()
    assert own.tolist() == [-300.0] * 3
    scaler.unscale_(optimizer)
    scaler.update()
    assert scaler._core.optimizers == 1


def test_a_clip_finds_the_norms_of_its_own_gradients_while_others_step():
    def train(seed):
        generator = torch.Generator().manual_seed(seed)
        parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(20)]
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        scaler = fastamp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(torch.ones(()))
        for _ in range(200):
            for parameter in parameters:
                parameter.grad = torch.randn(4, generator=generator)
            scaler.unscale_(optimizer)
            expected = torch.nn.utils.get_total_norm([p.grad for p in parameters])
            norm = fastamp.clip_grad_norm_(parameters, 1.0)
            torch.testing.assert_close(norm, expected)
            scaler.step(optimizer)
            scaler.update()

    train_on_threads(train)
