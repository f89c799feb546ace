# SPDX-License-Identifier: Apache-2.0
"""Constructors of torch's scalers while fastamp is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.amp import GradScaler as EarlyScaler

import fastamp

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize(
    ("make", "torchs"),
    [
        (lambda: torch.amp.GradScaler("cpu", init_scale=4.0), torch.amp.GradScaler),
        (lambda: EarlyScaler(device="cpu", init_scale=4.0), torch.amp.GradScaler),
        (lambda: torch.cpu.amp.GradScaler(init_scale=4.0), torch.cpu.amp.GradScaler),
        (lambda: torch.cuda.amp.GradScaler(4.0, enabled=False), torch.cuda.amp.GradScaler),
    ],
)
def test_torchs_scaler_constructors_make_fastamps_while_installed(make: Any, torchs: type):
    plain = make()
    assert type(plain) is torchs
    with fastamp.install():
        own = make()
    assert isinstance(own, fastamp.GradScaler)
    assert isinstance(own, torchs)
    assert own.is_enabled() == plain.is_enabled()
    assert own.state_dict() == plain.state_dict()
    assert type(make()) is torchs


@pytest.mark.usefixtures("installed")
def test_extras_reach_the_scaler_through_torchs_name():
    scaler = torch.amp.GradScaler("cpu", min_scale=2.0, hysteresis=3)
    assert scaler.state_dict()["hysteresis"] == 3
    with pytest.raises(TypeError, match="unexpected keyword"):
        torch.cpu.amp.GradScaler(min_scale=2.0)


def test_subclasses_by_others_keep_their_class_and_arguments():
    class Mixin:
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            made = super().__new__(cls)
            made.seen = (args, kwargs)
            return made

    class Derived(torch.amp.GradScaler):
        def __init__(self, factor: float) -> None:
            super().__init__("cpu", init_scale=factor)

    class Mixed(Derived, Mixin):
        pass

    def check() -> None:
        assert type(Derived(2.0)) is Derived
        assert Derived(2.0).get_scale() == 2.0

    check()
    with fastamp.install():
        check()

        class Later(Derived):
            pass

        assert type(Later(2.0)) is Later
        assert Mixed(factor=8.0).seen == ((), {"factor": 8.0})
    for cls in (Derived, Later, Mixed):
        assert type(cls(8.0)) is cls
    assert Mixed(8.0).seen == ((8.0,), {})
    check()
