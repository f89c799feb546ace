# SPDX-License-Identifier: Apache-2.0
"""How Accelerate, Lightning and FSDP use a scaler, private attributes included."""

import pytest
import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import fastamp


def trainable(grad=2.0):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), grad)
    return parameter, torch.optim.SGD([parameter], lr=1.0)


def test_accelerate_initialises_the_scale_by_device_type_before_scaling():
    scaler = fastamp.GradScaler("cpu", init_scale=4.0, hysteresis=2)
    scaler._lazy_init_scale_growth_tracker(scaler._device)
    assert scaler._scale.item() == scaler._get_scale_async().item() == 4.0
    scaler._scale = None
    with pytest.raises(AssertionError, match="_growth_tracker initialized before _scale"):
        scaler._lazy_init_scale_growth_tracker("cpu")


@pytest.mark.parametrize("gone", ["_scale", "_growth_tracker"])
@pytest.mark.parametrize("call", ["unscale_", "step", "update"])
def test_a_program_that_takes_one_of_both_tensors_away_meets_torchs_error(gone, call):
    def refused(kind):
        parameter, optimizer = trainable()
        scaler = kind("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        setattr(scaler, gone, None)
        with pytest.raises(AssertionError) as error:
            getattr(scaler, call)(*([] if call == "update" else [optimizer]))
        assert parameter.grad.tolist() == [2.0, 2.0]
        return str(error.value)

    assert refused(fastamp.GradScaler) == refused(torch.amp.GradScaler)


@pytest.mark.parametrize(("grad", "called"), [(2.0, True), (float("inf"), False)])
def test_accelerate_detects_skips_by_patching_step_and_passes_the_closure_by_position(grad, called):
    _, optimizer = trainable(grad)
    calls = []
    original = optimizer.step

    def patched(*args, **kwargs):
        calls.append((args, kwargs))
        return original(*args, **kwargs)

    optimizer.step = patched
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer, None)
    scaler.update()
    assert calls == ([((None,), {})] if called else [])


def test_lightning_unscales_clips_and_steps_with_its_closure_already_run():
    parameter, optimizer = trainable(8.0)
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.grad.norm().item() == pytest.approx(1.0)
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)


def test_a_subclass_in_the_style_of_fsdp_overrides_every_stage():
    log = []

    class Sharded(fastamp.GradScaler):
        def scale(self, outputs):
            log.append("scale")
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            return (outputs * self._scale).type(outputs.dtype)

        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16=True):
            log.append(("unscale_grads", allow_fp16))
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

        def unscale_(self, optimizer):
            super().unscale_(optimizer)
            for flag in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                flag.add_(1.0)  # Another rank overflowed, summed as FSDP does.

        def update(self, new_scale=None):
            log.append("update")
            super().update(new_scale)

    parameter = torch.nn.Parameter(torch.ones(2).half())
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = Sharded("cpu", init_scale=4.0)
    assert scaler.scale(torch.ones((), dtype=torch.float16)).dtype == torch.float16
    parameter.grad = torch.ones(2).half()
    scaler.step(optimizer)
    assert parameter.tolist() == [1.0, 1.0]
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert log == ["scale", ("unscale_grads", False), "update"]


def test_torchs_sharded_scaler_methods_work_on_our_instance():
    parameter, optimizer = trainable(8.0)
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    ShardedGradScaler.scale(scaler, torch.ones(()))
    flags = ShardedGradScaler._unscale_grads_(
        scaler, optimizer, torch.tensor(0.25), torch.zeros(()), True
    )
    assert parameter.grad.tolist() == [2.0, 2.0]
    assert flags[torch.device("cpu")].item() == 0.0


def test_torchs_own_methods_work_on_our_instance():
    # A program may hold torch.amp.GradScaler.step and call it on any scaler.
    base = torch.amp.GradScaler
    parameter, optimizer = trainable(8.0)
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    base.scale(scaler, torch.ones(()))
    base.unscale_(scaler, optimizer)
    base.step(scaler, optimizer)
    base.update(scaler)
    assert parameter.tolist() == [-1.0, -1.0]
    assert base.state_dict(scaler)["_growth_tracker"] == 1


def test_fused_optimizers_may_ask_the_scaler_for_flags_and_scale():
    parameter, optimizer = trainable(float("inf"))
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    device = parameter.device
    assert scaler._check_inf_per_device(optimizer)[device].item() == 1.0
    assert scaler._found_inf_per_device(optimizer)[device].item() == 1.0
    assert scaler._check_scale_growth_tracker("anything") == (scaler._scale, scaler._growth_tracker)


def test_a_maybe_opt_step_override_decides_on_the_step():
    class Never(fastamp.GradScaler):
        def _maybe_opt_step(self, *_args, **_kwargs):
            return "never"

    parameter, optimizer = trainable()
    scaler = Never("cpu")
    scaler.scale(torch.ones(()))
    assert scaler.step(optimizer) == "never"
    assert parameter.tolist() == [1.0, 1.0]


def test_a_replaced_scale_tensor_is_used():
    parameter, optimizer = trainable(8.0)
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler._scale = torch.tensor(8.0)
    scaler.unscale_(optimizer)
    assert parameter.grad.tolist() == [1.0, 1.0]
