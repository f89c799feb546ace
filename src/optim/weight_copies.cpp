// SPDX-License-Identifier: Apache-2.0
#include "optim/weight_copies.h"

#include "autocast/data_cast.h"
#include "autocast/kept_casts.h"
#include "autocast/tensor_identity.h"
#include "core/tensor_version.h"
#include "float8/float8_cast.h"
#include "float8/float8_cast_cache.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>

#include <exception>
#include <optional>
#include <utility>

namespace fastamp::autocast {

WeightCopies::WeightCopies() : id_(KeptCastStore::instance().acquire({})) {}

WeightCopies::~WeightCopies() { end(); }

void WeightCopies::end() {
  if (!std::exchange(ended_, true)) {
    KeptCastStore::instance().release(id_);
  }
}

at::Tensor CopyingStep::open(const at::Tensor& weight, c10::ScalarType to) {
  if (copies_ == nullptr || copies_->ended_) {
    return {};
  }
  if (is_captured(weight)) {
    // Replays will change the weights and move no version: their casts must not be kept any more.
    copies_->end();
    opened_.clear();
    return {};
  }
  const CallPath path = call_path(weight);
  const bool is_float8 = to == c10::kFloat8_e4m3fn;
  if (!can_be_kept(weight, runs_unchanged(weight, path)) ||
      (is_float8 && path == CallPath::kIntercepted)) {
    return {};
  }
  KeptCastStore::instance().add(copies_->id_, weight);
  if (!is_float8) {
    return open_16_bit(weight, to, path);
  }
  if (at::Tensor copy = open_float8(weight); copy.defined()) {
    return copy;
  }
  at::Tensor copy = open_16_bit(weight, c10::kBFloat16, path);
  return copy.defined() ? copy : open_16_bit(weight, c10::kHalf, path);
}

at::Tensor CopyingStep::open_16_bit(const at::Tensor& weight, c10::ScalarType to, CallPath path) {
  const auto weight_version = version_of(weight);
  auto taken = KeptCastStore::instance().take_out(weight, to);
  if (!taken.cast.defined()) {
    return {};  // Embeddings, normalisations: no region has requested a cast.
  }
  if (!taken.is_current) {
    // Out of date, or saved by a graph that may still run backward with the old values.
    std::optional<c10::InferenceMode> normal_mode;  // Its tensors are of no use outside of it.
    if (c10::InferenceMode::is_enabled()) {
      normal_mode.emplace(false);
    }
    taken.cast = cast_without_history(weight, to, path);
    if (was_wrapped(taken.cast, weight)) {
      return {};
    }
  }
  opened_.push_back({&weight, taken.cast, {}, to, weight_version, version_of(taken.cast)});
  return std::move(taken.cast);
}

at::Tensor CopyingStep::open_float8(const at::Tensor& weight) {
  if (!can_have_float8_copy(weight)) {
    return {};
  }
  const auto weight_version = version_of(weight);
  auto taken = KeptFloat8Casts::instance().take_out(weight);
  if (!taken.has_value() || taken->to() != c10::kFloat8_e4m3fn) {
    return {};
  }
  const bool is_current = taken->is_current(weight, c10::kFloat8_e4m3fn);
  Float8Cast cast = std::move(*taken).cast();
  if (!is_current || !is_float8_copy(cast) || !is_unshared_float8_copy(cast)) {
    const bool columns = cast.columns.defined();
    cast = {};  // Its memory may serve the new one.
    const c10::InferenceMode normal_mode(false);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    cast = make_float8_copy(weight, columns);
  }
  const at::Tensor rows = cast.rows;
  opened_.push_back(
      {&weight, rows, std::move(cast), c10::kFloat8_e4m3fn, weight_version, version_of(rows)});
  return rows;
}

void CopyingStep::finish() {
  try {
    keep_written();
  } catch (const std::exception&) {
    opened_.clear();  // The step has been made. Casts that were not kept are made anew.
  }
}

void CopyingStep::keep_written() {
  std::vector<Opened> float8;
  for (Opened& opened : std::exchange(opened_, {})) {
    // After a write other than the step's own, the weight copy may hold another value.
    if (version_of(*opened.weight) != opened.weight_version + 1 ||
        version_of(opened.cast) != opened.cast_version + 1) {
      continue;
    }
    if (opened.float8.rows.defined()) {
      float8.push_back(std::move(opened));
    } else {
      KeptCastStore::instance().keep(*opened.weight, TensorIdentity(*opened.weight), opened.to,
                                     opened.cast);
    }
  }
  finish_float8(float8);
}

void CopyingStep::finish_float8(const std::vector<Opened>& written) {
  std::vector<SteppedFloat8Copy> copies;
  copies.reserve(written.size());
  for (const Opened& opened : written) {
    copies.push_back({opened.weight, opened.float8});
  }
  refresh_float8_copies(copies);
  for (const Opened& opened : written) {
    const at::Tensor& weight = *opened.weight;
    KeptFloat8Casts::instance().insert(weight,
                                       {weight, TensorIdentity(weight), opened.to, opened.float8});
  }
}

}  // namespace fastamp::autocast
