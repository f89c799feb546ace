// SPDX-License-Identifier: Apache-2.0
#include "autocast/cache/weight_copies.h"

#include "autocast/cache/kept_casts.h"
#include "autocast/make/tensor_identity.h"

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
  if (!can_be_kept(weight, path)) {
    return {};
  }
  auto& store = KeptCastStore::instance();
  store.add(copies_->id_, weight);
  const auto weight_version = version_of(weight);
  auto taken = store.take_out(weight, to);
  if (!taken.cast.defined()) {
    return {};  // Embeddings, normalisations: no region has requested a cast.
  }
  if (!taken.is_current) {
    // Out of date, or saved by a graph that may still run backward with the old values.
    taken.cast = make_kept_cast(weight, to, path);
  }
  opened_.push_back({&weight, taken.cast, to, weight_version, version_of(taken.cast)});
  return std::move(taken.cast);
}

void CopyingStep::finish() {
  for (const Opened& opened : std::exchange(opened_, {})) {
    TensorIdentity written(*opened.weight);
    // After a write other than the step's own, the weight copy may hold another value.
    if (version_of(*opened.weight) == opened.weight_version + 1 &&
        version_of(opened.cast) == opened.cast_version + 1) {
      KeptCastStore::instance().insert(*opened.weight, std::move(written), opened.to, opened.cast);
    }
  }
}

}  // namespace fastamp::autocast
