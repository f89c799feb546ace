// SPDX-License-Identifier: Apache-2.0
#include "autocast/registration.h"

#include "autocast/boxed_kernel.h"
#include "autocast/op_policy.h"
#include "autocast/op_table.h"
#include "autocast/thread_cache.h"
#include "autocast/torch_state.h"
#include "autocast/unify_kernels.h"

#include <fastamp/autocast/registration.h>

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <bitset>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace fastamp {
namespace autocast {
namespace {

/// torch warns once per process that a kernel was registered over its own, which is intended here.
/// Any other warning goes on to the handler that was there.
class OverrideWarningFilter : public c10::WarningHandler {
 public:
  explicit OverrideWarningFilter(c10::WarningHandler* next) : next_(next) {}
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("verriding a previously registered kernel") == std::string::npos) {
      next_->process(warning);
    }
  }

 private:
  c10::WarningHandler* next_;
};

/// Puts the boxed kernel of a registered op on a device's autocast key for as long as the library
/// lives.
torch::Library implement_registered(OpId op, PolicyDevice device) {
  const std::string name = registered_op(op).name;
  torch::Library library(torch::Library::IMPL, name.substr(0, name.find("::")),
                         autocast_key(device), __FILE__, __LINE__);
  library.impl(name.c_str(),
               torch::CppFunction::makeFromBoxedFunctor(std::make_unique<BoxedKernel>(op, device)));
  return library;
}

/// The kernels registered on one dispatch key. Destroying it gives torch's back.
class DeviceRegistration {
 public:
  explicit DeviceRegistration(PolicyDevice device)
      : device_(device),
        library_(torch::Library::IMPL, "aten", autocast_key(device), __FILE__, __LINE__) {
    if (device == PolicyDevice::kCpu) {
      // In CPU regions, too, torch.nn.TransformerEncoder makes its input nested if it is padded.
      library_.impl(
          "_transformer_encoder_layer_fwd",
          torch::CppFunction::makeFromBoxedFunctor(std::make_unique<NestedInputKernel>(device)));
    }
  }

  void add(OpId op) {
    const auto index = static_cast<std::size_t>(op);
    if (op == kEveryOp) {
      if (unify_ == nullptr) {
        unify_ = std::make_unique<UnifyKernels>(device_);
        g_expects_new_ops.store(true, std::memory_order_relaxed);
      }
    } else if (index >= kNumOps) {
      if (!of_users_.contains(op)) {
        of_users_.emplace(op, implement_registered(op, device_));
      }
    } else if (!registered_.test(index)) {
      const KernelEntry& entry = kernel_entries()[index];
      entry.implement(library_, entry.qualified_name().c_str(), device_);
      registered_.set(index);
      if (unify_ != nullptr) {
        unify_->add_over(op);
      }
    }
  }

  void remove(OpId op) {
    if (op == kEveryOp) {
      unify_.reset();
      return;
    }
    of_users_.erase(op);
    reach_new_ops();
  }

  void reach_new_ops() {
    if (unify_ != nullptr) {
      unify_->add_all();
    }
  }

 private:
  PolicyDevice device_;
  torch::Library library_;
  std::bitset<kNumOps> registered_;
  std::map<OpId, torch::Library> of_users_;
  std::unique_ptr<UnifyKernels> unify_;  ///< Null while nobody has used the policy.
};

struct Registry {
  std::mutex mutex;
  std::array<std::unique_ptr<DeviceRegistration>, kNumPolicyDevices> devices;
  std::atomic<bool> registered = false;
  bool policies_loaded = false;
};

/// Never destroyed: at process exit other threads may still run ops, and the dispatcher may be
/// gone.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

template <class Function>
void without_override_warning(const Function& function) {
  OverrideWarningFilter filter(c10::WarningUtils::get_warning_handler());
  const c10::WarningUtils::WarningHandlerGuard guard(&filter);
  function();
}

void load_policies_once(Registry& r) {
  if (!r.policies_loaded) {
    load_default_policies();
    r.policies_loaded = true;
  }
}

void register_all(Registry& r) {
  for (const auto device : {PolicyDevice::kCpu, PolicyDevice::kCuda}) {
    auto registration = std::make_unique<DeviceRegistration>(device);
    for (std::size_t i = 0; i < kNumOps + num_registered_ops(); ++i) {
      const auto op = static_cast<OpId>(i);
      if (default_policy(op, device) != OpPolicy::kPass ||
          process_policy_of(op, device) != OpPolicy::kPass) {
        registration->add(op);
      }
    }
    if (process_policy_of(kEveryOp, device) != OpPolicy::kPass) {
      registration->add(kEveryOp);
    }
    r.devices[static_cast<std::size_t>(device)] = std::move(registration);
  }
}

}  // namespace

std::atomic<bool> g_expects_new_ops{false};

void ensure_policies_loaded() {
  Registry& r = registry();
  const std::scoped_lock lock(r.mutex);
  load_policies_once(r);
}

void ensure_registered(OpId op, PolicyDevice device) {
  Registry& r = registry();
  const std::scoped_lock lock(r.mutex);
  if (auto& registration = r.devices[static_cast<std::size_t>(device)]) {
    without_override_warning([&] { registration->add(op); });
  }
}

void reach_new_ops() {
  Registry& r = registry();
  const std::scoped_lock lock(r.mutex);
  for (const auto& registration : r.devices) {
    if (registration != nullptr) {
      without_override_warning([&] { registration->reach_new_ops(); });
    }
  }
}

void drop_registration(OpId op, PolicyDevice device) {
  Registry& r = registry();
  const std::scoped_lock lock(r.mutex);
  if (auto& registration = r.devices[static_cast<std::size_t>(device)]) {
    registration->remove(op);
  }
}

}  // namespace autocast

void register_kernels() {
  autocast::Registry& r = autocast::registry();
  if (r.registered.load(std::memory_order_acquire)) {
    return;
  }
  const std::scoped_lock lock(r.mutex);
  if (r.registered.load(std::memory_order_relaxed)) {
    return;
  }
  autocast::load_policies_once(r);
  autocast::without_override_warning([&] { autocast::register_all(r); });
  r.registered.store(true, std::memory_order_release);
}

void unregister_kernels() {
  {
    autocast::Registry& r = autocast::registry();
    const std::scoped_lock lock(r.mutex);
    TORCH_CHECK(!autocast::in_region(),
                "unregister_kernels: expected to be called outside autocast regions, got a call "
                "inside one. "
                "Leave every "
                "autocast region of this thread first.");
    TORCH_CHECK(autocast::g_overriding_threads.load(std::memory_order_relaxed) == 0,
                "unregister_kernels: expected no thread to have op policies of its own, got one "
                "that has. End every "
                "OpPolicyGuard, in Python every policies.override block, first.");
    for (auto& registration : r.devices) {
      registration.reset();
    }
    r.registered.store(false, std::memory_order_release);
  }
  // Not under the lock: the end of a cast may end its weight, and run code that registers again.
  autocast::clear_thread_cache();
}

bool kernels_registered() {
  return autocast::registry().registered.load(std::memory_order_acquire);
}

}  // namespace fastamp
