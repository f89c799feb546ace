// SPDX-License-Identifier: Apache-2.0
#include "optim/starting_masters.h"

#include <fastamp/optim/stored_state.h>

#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fastamp::optim {
namespace {

using StrongTensor = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Entry {
  // As long as it lives, no other tensor comes to live at the address that is the key.
  WeakTensor param = WeakTensor(StrongTensor());
  at::Tensor master;
};

struct Masters {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, Entry> by_param;
};

/// Never destroyed: parameters may outlive static objects.
Masters& kept() {
  static auto* const instance = new Masters();
  return *instance;
}

at::Tensor for_param(const at::Tensor& master, const at::Tensor& param) {
  return master.defined() && master.sizes() == param.sizes() ? master.to(param.device())
                                                             : at::Tensor();
}

}  // namespace

void set_starting_masters(at::TensorList params, at::TensorList masters) {
  TORCH_CHECK_VALUE(params.size() == masters.size(),
                    "set_starting_masters: expected a master for each of ", params.size(),
                    " parameters, got ", masters.size());
  forget_frozen_starting_masters();
  for (const auto& param : params) {
    forget_starting_master(param.unsafeGetTensorImpl());
  }
  const std::scoped_lock lock(kept().mutex);
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (masters[i].defined()) {
      kept().by_param.insert_or_assign(
          params[i].unsafeGetTensorImpl(),
          Entry{.param = WeakTensor(params[i].getIntrusivePtr()), .master = masters[i]});
    }
  }
}

std::vector<at::Tensor> with_starting_masters() {
  std::vector<at::Tensor> params;
  const std::scoped_lock lock(kept().mutex);
  for (const auto& [impl, entry] : kept().by_param) {
    if (auto param = entry.param.lock()) {
      params.emplace_back(std::move(param));
    }
  }
  return params;
}

at::Tensor starting_master_of(const at::Tensor& param) {
  const auto master = kept_starting_master(param);
  return master.defined() ? current_master(param, master) : master;
}

at::Tensor kept_starting_master(const at::Tensor& param) {
  at::Tensor master;
  {
    const std::scoped_lock lock(kept().mutex);
    const auto entry = kept().by_param.find(param.unsafeGetTensorImpl());
    if (entry == kept().by_param.end()) {
      return {};
    }
    master = entry->second.master;
  }
  return for_param(master, param);
}

void forget_starting_master(const c10::TensorImpl* param) noexcept {
  Entry gone;
  const std::scoped_lock lock(kept().mutex);
  if (const auto entry = kept().by_param.find(param); entry != kept().by_param.end()) {
    gone = std::move(entry->second);
    kept().by_param.erase(entry);
  }
}

void forget_frozen_starting_masters() {
  // Freed without the lock: the end of a tensor may run Python, and another thread may let go of a
  // parameter while it is looked at.
  std::vector<Entry> gone;
  std::vector<StrongTensor> looked_at;
  const std::scoped_lock lock(kept().mutex);
  std::erase_if(kept().by_param, [&](auto& kept_one) {
    const auto& param = looked_at.emplace_back(kept_one.second.param.lock());
    const bool goes = !param || !param->requires_grad();
    if (goes) {
      gone.push_back(std::move(kept_one.second));
    }
    return goes;
  });
}

}  // namespace fastamp::optim
