// SPDX-License-Identifier: Apache-2.0
#include "autocast/float8_memories.h"

#include "autocast/tensor_identity.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace fastamp::autocast {
namespace {

/// Binades of headroom. An activation's amax hardly ever doubles from one step to the next; that of
/// a gradient does, and e5m2 has the range for two.
constexpr std::uint32_t kActivationHeadroom = 1;
constexpr std::uint32_t kGradHeadroom = 2;

at::Tensor new_memory(const at::Tensor& weight) {
  return at::full({}, -1, at::TensorOptions(at::kInt).device(weight.device()));
}

/// One store for the process, never destroyed: other threads may run ops while the process exits.
class MemoryStore {
 public:
  static MemoryStore& instance() {
    static auto* store = new MemoryStore;
    return *store;
  }

  Float8Memories of(const at::Tensor& weight) {
    const auto context = execution_context(weight.device());
    {
      const std::scoped_lock lock(mutex_);
      if (const Entry* entry = find(weight, context)) {
        return entry->memories;
      }
    }
    // Ops run without the lock. If two threads come here at once, one's are dropped.
    const c10::InferenceMode normal_mode(false);
    const at::NoGradGuard no_grad;
    Float8Memories made{.x = {new_memory(weight), kActivationHeadroom},
                        .grad = {new_memory(weight), kGradHeadroom}};
    Entries dying;
    const std::scoped_lock lock(mutex_);
    if (const Entry* other = find(weight, context)) {
      return other->memories;
    }
    dying = take_dead_sometimes();
    entries_.emplace(weight.unsafeGetTensorImpl(),
                     Entry{Weak(weight.getIntrusivePtr()), weight.device(), context, made});
    return made;
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Entry {
    Weak weight;  ///< Keeps the address from being used by another weight.
    c10::Device device;
    ExecutionContext context;
    Float8Memories memories;
  };
  using Entries = std::unordered_multimap<const c10::TensorImpl*, Entry>;

  const Entry* find(const at::Tensor& weight, const ExecutionContext& context) const {
    const auto [first, last] = entries_.equal_range(weight.unsafeGetTensorImpl());
    const auto found = std::find_if(first, last, [&](const auto& entry) {
      return entry.second.device == weight.device() && entry.second.context == context;
    });
    return found == last ? nullptr : &found->second;
  }

  /// Whenever the entries have doubled.
  Entries take_dead_sometimes() {
    Entries dead;
    if (entries_.size() < next_sweep_) {
      return dead;
    }
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      const auto current = entry++;
      if (current->second.weight.expired()) {
        dead.insert(entries_.extract(current));
      }
    }
    next_sweep_ = std::max(kFirstSweep, 2 * entries_.size());
    return dead;
  }

  static constexpr std::size_t kFirstSweep = 64;

  std::mutex mutex_;
  Entries entries_;
  std::size_t next_sweep_ = kFirstSweep;
};

}  // namespace

Float8Memories float8_memories_of(const at::Tensor& weight) {
  return MemoryStore::instance().of(weight);
}

}  // namespace fastamp::autocast
