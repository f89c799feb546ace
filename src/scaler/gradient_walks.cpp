// SPDX-License-Identifier: Apache-2.0
#include "scaler/gradient_walks.h"

#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

namespace fastamp::scaler {
namespace {

/// A version is two cache lines away: the tensor's, and then that of its counter.
void prefetch_versions(const std::vector<at::Tensor>& gradients, std::size_t i) {
  constexpr std::size_t kTensorAhead = 24;
  constexpr std::size_t kCounterAhead = 12;
  if (i + kTensorAhead < gradients.size()) {
    __builtin_prefetch(gradients[i + kTensorAhead].unsafeGetTensorImpl());
  }
  if (i + kCounterAhead < gradients.size()) {
    const auto& version = gradients[i + kCounterAhead].unsafeGetTensorImpl()->version_counter();
    const void* counter = nullptr;
    static_assert(sizeof(version) == sizeof(counter));  // It is a pointer to the counter.
    std::memcpy(static_cast<void*>(&counter), static_cast<const void*>(&version), sizeof(counter));
    __builtin_prefetch(counter);
  }
}

}  // namespace

bool note_versions(const std::vector<at::Tensor>& gradients, bool bump,
                   std::vector<std::uint32_t>& versions) {
  versions.resize(gradients.size());
  bool all = true;
  bool shared = false;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    prefetch_versions(gradients, i);
    auto* const impl = gradients[i].unsafeGetTensorImpl();
    if (impl->is_inference()) {
      all = false;
      continue;
    }
    if (bump) {
      impl->bump_version();
      shared = shared || !impl->version_counter().unique();
    }
    versions[i] = impl->version_counter().current_version();
  }
  if (shared && all) {  // Views of one tensor have one counter, which went on.
    std::ranges::transform(gradients, versions.begin(), [](const at::Tensor& gradient) {
      return gradient.unsafeGetTensorImpl()->version_counter().current_version();
    });
  }
  return all;
}

void drop_gradients(std::vector<at::Tensor>& gradients) {
  constexpr std::size_t kAhead = 16;
  auto dying = std::exchange(gradients, {});
  for (std::size_t i = 0; i < dying.size(); ++i) {
    if (i + kAhead < dying.size()) {
      __builtin_prefetch(dying[i + kAhead].unsafeGetTensorImpl(), /*rw=*/1);
    }
    dying[i].reset();
  }
}

}  // namespace fastamp::scaler
