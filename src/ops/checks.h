// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the ops refuse. Every check throws what fastamp/ops/ promises and reads no tensor data, so
// the Meta kernels are checks alone; fn is the op, for messages.

#include "kernels/amp_args.h"
#include "kernels/fused_steps.h"
#include "kernels/muon.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fastamp::ops {

/// The checks of each op, for callers that go below the dispatcher or check before they begin.
/// Each is defined beside the op.
void check_unscale(const kernels::UnscaleArgs& args);
void check_norm(const kernels::NormArgs& args);
kernels::StepEntries check_fused_sgd(const FusedSgdArgs& args);
kernels::StepEntries check_fused_adamw(const FusedAdamwArgs& args);
kernels::StepEntries check_muon_momentum(const MuonMomentumArgs& args);
kernels::StepEntries check_muon_apply(const MuonApplyArgs& args);

/// Throws unless `t` is strided, has one element of `dtype` and is on `device`, that of
/// `device_of`.
void check_single(const char* fn, const char* name, const at::Tensor& t, at::ScalarType dtype,
                  c10::Device device, const char* device_of);

/// Checks a tensor that may be None.
void check_optional(const char* fn, const char* name, const std::optional<at::Tensor>& t,
                    at::ScalarType dtype, c10::Device device, const char* device_of);

/// Checks the tensor whose device all others must be on; returns the device.
c10::Device check_first(const char* fn, const char* name, const at::Tensor& t,
                        at::ScalarType dtype);

/// Throws unless the table, if there is one, is contiguous and of `rows` (any number of them, but
/// at least one, if negative) times `columns`.
void check_table(const char* fn, const char* name, const std::optional<at::Tensor>& table,
                 at::ScalarType dtype, c10::Device device, std::int64_t rows, std::int64_t columns);

/// Checks the non_finite_counts for that many gradients.
void check_counts(const char* fn, const std::optional<at::Tensor>& counts, c10::Device device,
                  std::size_t grads);

/// Checks gradients, which must be on inv_scale's device; `grads` are those from number `first` on.
/// Those that are written may be fp64, and may not overlap themselves.
void check_gradients(const char* fn, at::TensorList grads, std::size_t first, c10::Device device,
                     bool written);

/// Throws unless list[index] fits `like`: in shape and device, and in dtype what its slot may be.
/// @param codes  Moments: they may also be codes of 8 bits.
void check_operand(const char* fn, const char* list, std::size_t index, const at::Tensor& t,
                   const at::Tensor& like, kernels::Slot slot, bool codes = false);

/// Throws unless the lists of groups fit the parameters, and there is one.
void check_groups(const kernels::StepArgs& args);
/// Throws unless scalars and flag of an AmpStep are on the device of the parameters.
void check_amp_step(const kernels::StepArgs& args);

/// State lists of a step; a list holds a tensor for each parameter of the groups that use it.
struct StateList {
  kernels::Slot slot;
  const char* name;
  at::TensorList tensors;
  std::vector<bool> used;  ///< Per group.
  bool codes = false;      ///< Moments that may be codes of 8 bits.
};

/// Checks all that fused steps have in common; returns the entries. A walk that asks for the cache
/// lines of tensors ahead: with 10 000 parameters waiting for them would be nearly all of its time.
kernels::StepEntries check_step(const kernels::StepArgs& args,
                                const std::vector<StateList>& states);

/// Throws unless the list of hyperparameters has an element per group.
void check_per_group(const char* fn, const char* name, std::size_t got, std::size_t groups);

}  // namespace fastamp::ops
