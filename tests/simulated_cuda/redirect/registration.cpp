// SPDX-License-Identifier: Apache-2.0
//
// Which operators are redirected: those of aten and torchvision that have a kernel for CUDA, and
// one for the CPU. What only makes or describes tensors, or waits for a value, stays torch's code
// for CUDA. torchvision's are redirected by the first of torch's operators after its import.
#include "simulated_cuda/redirect/libraries.h"
#include "simulated_cuda/redirect/operators.h"
#include "simulated_cuda/simulated_cuda.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace simulated_cuda {
namespace {

using Names = std::set<std::string>;

bool returns_view(const c10::OperatorHandle& op) {
  for (const auto& result : op.schema().returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return true;
  }
  return false;
}

bool stays(const c10::OperatorHandle& op) {
  static const Names names = {
      "aten::_efficientzerotensor",
      "aten::_fused_sdp_choice",
      "aten::_local_scalar_dense",
      "aten::_pin_memory",
      "aten::empty.memory_format",
      "aten::empty_strided",
      "aten::is_pinned",
      "aten::is_set_to",
      "aten::record_stream",
      "aten::resize_",
      "aten::set_",
      "aten::set_.source_Storage",
      "aten::set_.source_Storage_storage_offset",
      "aten::set_.source_Tensor",
  };
  return names.count(toString(op.operator_name())) != 0 || returns_view(op);
}

bool stays_sparse(const c10::OperatorHandle& op) {
  static const Names names = {
      "aten::_coalesced_",
      "aten::_dimI",
      "aten::_dimV",
      "aten::_indices",
      "aten::_nnz",
      "aten::_sparse_coo_tensor_with_dims",
      "aten::_sparse_coo_tensor_with_dims_and_tensors",
      "aten::_values",
      "aten::dense_dim",
      "aten::empty.memory_format",
      "aten::indices",
      "aten::is_coalesced",
      "aten::sparse_dim",
      "aten::sparse_resize_",
      "aten::sparse_resize_and_clear_",
      "aten::values",
  };
  return names.count(toString(op.operator_name())) != 0 || stays(op);
}

/// Stands in for operators of cuDNN that have no kernel for the CPU.
void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
            torch::jit::Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "simulated CUDA: ", op.operator_name(), " is not simulated");
}

/// Is the operator made of others for all devices, but for a kernel of each that it calls itself?
bool hides_kernel(const c10::OperatorName& name) {
  return name.name == "aten::ldexp" || name.name == "aten::ldexp_";
}

/// Is the operator cuDNN's, and does it compute? Where weights lie, runtime/cudnn.cpp says.
bool computes_by_cudnn(const c10::OperatorName& name) {
  return name.name.find("cudnn") != std::string::npos &&
         name.name.find("_use_") == std::string::npos &&
         name.name != "aten::_cudnn_rnn_flatten_weight";
}

struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

void add_for(const c10::OperatorName& name, c10::DispatchKey key, c10::KernelFunction kernel) {
  static auto* const handles = new std::vector<c10::RegistrationHandleRAII>();
  handles->push_back(c10::Dispatcher::singleton().registerImpl(
      name, key, std::move(kernel), std::nullopt, nullptr, "simulated CUDA"));
}

void add_library(const char* name, c10::KernelFunction kernel) {
  add_for({name, ""}, c10::DispatchKey::CUDA, std::move(kernel));
}

void redirect(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  const auto name = op.operator_name();
  if (op.hasKernelForDispatchKey(DispatchKey::SparseCUDA) &&
      op.hasKernelForDispatchKey(DispatchKey::SparseCPU) && !stays_sparse(op)) {
    add_for(name, DispatchKey::SparseCUDA,
            c10::KernelFunction::makeFromBoxedFunction<&run_operator>());
  }
  const bool has_cuda = op.hasKernelForDispatchKey(DispatchKey::CUDA) || hides_kernel(name);
  if (!has_cuda || stays(op)) {
    return;
  }
  if (op.hasComputedKernelForDispatchKey(DispatchKey::CPU)) {
    add_for(name, DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&run_operator>());
  } else if (computes_by_cudnn(name)) {
    add_for(name, DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&refuse>());
  } else if (traces()) {
    std::fprintf(stderr, "simulated CUDA: %s has no kernel for the CPU\n", toString(name).c_str());
  }
}

/// Is the operator torch's own? Others have kernels of their own, which are under test.
bool is_torchs(const c10::OperatorName& name) { return name.name.rfind("aten::", 0) == 0; }

bool is_torchvisions(const c10::OperatorName& name) {
  return name.name.rfind("torchvision::", 0) == 0;
}

/// Operators that libraries have brought since the start; their kernels come after them.
class Newcomers final : public c10::OpRegistrationListener {
 public:
  void onOperatorRegistered(const c10::OperatorHandle& op) override {
    if (!is_torchvisions(op.operator_name())) return;
    const std::scoped_lock lock(mutex_);
    names_.push_back(op.operator_name());
    is_empty_ = false;
  }
  void onOperatorDeregistered(const c10::OperatorHandle& /*op*/) override {}

  std::vector<c10::OperatorName> take() {
    if (is_empty_) return {};
    const std::scoped_lock lock(mutex_);
    is_empty_ = true;
    return std::exchange(names_, {});
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> is_empty_{true};
  std::vector<c10::OperatorName> names_;
};

Newcomers& newcomers() {
  static auto* const listener = [] {
    auto made = std::make_unique<Newcomers>();
    auto* const known = made.get();
    static auto* const handle = new c10::RegistrationHandleRAII(
        c10::Dispatcher::singleton().addRegistrationListener(std::move(made)));
    (void)handle;
    return known;
  }();
  return *listener;
}

}  // namespace

void redirect_newcomers() {
  const auto names = newcomers().take();
  if (names.empty()) return;
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard no_warnings(&quiet);
  for (const auto& name : names) {
    if (const auto op = c10::Dispatcher::singleton().findSchema(name)) redirect(*op);
  }
}

}  // namespace simulated_cuda

/// Called by the runtime when a program first asks for devices.
extern "C" void simulated_cuda_redirect() {
  using namespace simulated_cuda;
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard no_warnings(&quiet);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (op.has_value() && is_torchs(name)) {
      redirect(*op);
    }
  }
  redirect_newcomers();
  register_libraries(&add_library);
  register_recurrent(&add_library);
}
