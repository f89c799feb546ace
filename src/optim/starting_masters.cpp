// SPDX-License-Identifier: Apache-2.0
#include "optim/starting_masters.h"

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

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Entry {
  // As long as it lives, no other tensor comes to live at the address that is the key.
  WeakTensor param;
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

at::Tensor find(const at::Tensor& param, bool forget) {
  at::Tensor found;
  {
    const std::scoped_lock lock(kept().mutex);
    const auto entry = kept().by_param.find(param.unsafeGetTensorImpl());
    if (entry == kept().by_param.end()) {
      return {};
    }
    found = entry->second.master;
    if (forget) {
      kept().by_param.erase(entry);
    }
  }
  return for_param(found, param);
}

}  // namespace

void set_starting_masters(at::TensorList params, at::TensorList masters) {
  TORCH_CHECK_VALUE(params.size() == masters.size(),
                    "set_starting_masters: expected a master for each of ", params.size(),
                    " parameters, got ", masters.size());
  std::vector<Entry> gone;  // Freed without the lock: the end of a tensor may run Python.
  const std::scoped_lock lock(kept().mutex);
  auto& all = kept().by_param;
  for (auto entry = all.begin(); entry != all.end();) {
    if (entry->second.param.expired()) {
      gone.push_back(std::move(entry->second));
      entry = all.erase(entry);
    } else {
      ++entry;
    }
  }
  for (std::size_t i = 0; i < params.size(); ++i) {
    const auto known = all.find(params[i].unsafeGetTensorImpl());
    if (known != all.end()) {
      gone.push_back(std::move(known->second));
      all.erase(known);
    }
    if (masters[i].defined()) {
      all.emplace(params[i].unsafeGetTensorImpl(),
                  Entry{WeakTensor(params[i].getIntrusivePtr()), masters[i]});
    }
  }
}

at::Tensor starting_master_of(const at::Tensor& param) { return find(param, /*forget=*/false); }

at::Tensor take_starting_master(const at::Tensor& param) { return find(param, /*forget=*/true); }

}  // namespace fastamp::optim
