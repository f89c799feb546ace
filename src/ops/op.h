// SPDX-License-Identifier: Apache-2.0
#pragma once

// How an op is described to the dispatcher.
//
// An op is a struct with
//   Args             the arguments, as members in the order of the schema
//   kEntry           the typed entry in include/fastamp/ops
//   kSchema          the only statement of which arguments are written
//   check(args)      throws what the entry promises and reads no data; what it returns, if
//                    anything, is handed to the kernels
//   kCpu             the kernel: of Args, and of what check() returned
//   kCuda            where kernels::CudaKernels has the one for CUDA
//   device(args)     where the tensors are, for the refusal of other devices
//   only_reads(args, i)
//                    optional: whether this call only reads argument i, though the schema says
//                    that it is written
// and FASTAMP_REGISTER_OP(the struct) registers all of it.

#include "core/tensor_version.h"
#include "kernels/cuda_kernels.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace fastamp::ops {

template <typename Op>
std::string name_of() {
  const std::string_view schema = Op::kSchema;
  return std::string(schema.substr(0, schema.find('(')));
}

/// The Meta kernel: fake tensors and torch.compile call it.
template <typename Op>
void check_only(const typename Op::Args& args) {
  static_cast<void>(Op::check(args));
}

/// Where there is no kernel (sparse gradients, other devices) the call fails with one sentence
/// about the argument, not with torch's list of backends.
template <typename Op>
void check_and_refuse(const typename Op::Args& args) {
  static_cast<void>(Op::check(args));
  const c10::Device device = Op::device(args);
  const std::string why_not = device.is_cuda() ? cuda_part_refusal() : "";
  TORCH_CHECK_NOT_IMPLEMENTED(false, name_of<Op>(),
                              ": expected tensors on cpu or, in a CUDA build, on cuda, got ",
                              device, why_not.empty() ? "" : ": " + why_not);
}

template <typename Op, typename Kernel>
void check_and_run(Kernel* kernel, const typename Op::Args& args) {
  if constexpr (std::is_void_v<decltype(Op::check(args))>) {
    Op::check(args);
    kernel(args);
  } else {
    kernel(args, Op::check(args));
  }
}

template <typename Op>
void run_on_cpu(const typename Op::Args& args) {
  check_and_run<Op>(Op::kCpu, args);
}

template <typename Op>
void run_on_cuda(const typename Op::Args& args) {
  const auto* const kernels = kernels::cuda_kernels();
  if (kernels == nullptr) {
    check_and_refuse<Op>(args);
    return;
  }
  using Cuda = std::remove_cvref_t<decltype(kernels->*Op::kCuda)>;
  static_assert(std::is_same_v<Cuda, std::remove_const_t<decltype(Op::kCpu)>>);
  check_and_run<Op>(kernels->*Op::kCuda, args);
}

/// The functions of an op's own signature, T being the arguments of its entry.
template <typename Op, typename Entry = std::remove_const_t<decltype(Op::kEntry)>>
struct Signature;
template <typename Op, typename... T>
struct Signature<Op, void (*)(T...)> {
  using Args = Op::Args;

  /// Found once: a lookup costs a lock and a hash.
  static const auto& handle() {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(("fastamp::" + name_of<Op>()).c_str(), "")
                               .template typed<void(T...)>();
    return op;
  }

  /// A dispatcher kernel made of a function that takes all arguments as one struct.
  template <auto kRun>
  static void call(T... args) {
    kRun(Args{args...});
  }

  /// Runs the op below autograd's keys, then bumps the versions of what was written, so that
  /// backward notices an edited saved tensor and caches keyed on versions stay right. A call that
  /// throws bumps none.
  static void call_and_bump(c10::DispatchKeySet keys, T... args) {
    static const auto written = [] {
      std::vector<bool> marked;
      for (const auto& argument : handle().schema().arguments()) {
        marked.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
      }
      return marked;
    }();
    handle().redispatch(keys & c10::after_ADInplaceOrView_keyset, args...);
    const Args all{args...};
    std::size_t i = 0;
    const auto bump = [&](const auto& argument) {
      if (written[i] && !only_reads(all, i)) {
        bump_versions(argument);
      }
      ++i;
    };
    (bump(args), ...);
  }

 private:
  static bool only_reads(const Args& args, std::size_t argument) {
    if constexpr (requires { Op::only_reads(args, argument); }) {
      return Op::only_reads(args, argument);
    }
    return false;
  }

  static void bump_versions(const at::Tensor& tensor) { bump_version(tensor); }
  static void bump_versions(const std::optional<at::Tensor>& tensor) {
    if (tensor) {
      bump_version(*tensor);
    }
  }
  static void bump_versions(at::TensorList tensors) {
    for (const auto& tensor : tensors) {
      bump_version(tensor);
    }
  }
  template <typename Other>
  static void bump_versions(const Other& /*no tensor*/) {}
};

/// What a typed entry does: calls the op through the dispatcher.
template <typename Op, typename... T>
void call_op(const T&... args) {
  Signature<Op>::handle().call(args...);
}

/// Registers schema and kernels and never takes them back: while the process exits, other threads
/// may still call them. fastamp is linked so that dlclose() does not unload it.
template <typename Op>
bool register_op(const char* file, std::uint32_t line) {
  using c10::DispatchKey;
  using Own = Signature<Op>;
  auto* const library = new torch::Library(torch::Library::FRAGMENT, "fastamp",
                                           /*k=*/std::nullopt, file, line);
  library->def(Op::kSchema, {at::Tag::pt2_compliant_tag});
  const auto name = name_of<Op>();
  const auto implement = [&](DispatchKey key, auto&& kernel) {
    library->impl(name.c_str(), torch::dispatch(key, std::forward<decltype(kernel)>(kernel)));
  };
  implement(DispatchKey::CPU, &Own::template call<run_on_cpu<Op>>);
  implement(DispatchKey::CUDA, &Own::template call<run_on_cuda<Op>>);
  implement(DispatchKey::Meta, &Own::template call<check_only<Op>>);
  implement(DispatchKey::CompositeExplicitAutograd, &Own::template call<check_and_refuse<Op>>);
  // The ops update gradients and scaler state, never a graph: nothing to differentiate. (Left to
  // torch's default, each call would box 10 000 tensors to find that out.)
  implement(DispatchKey::Autograd, torch::CppFunction::makeFallthrough());
  implement(DispatchKey::ADInplaceOrView, &Own::call_and_bump);
  return true;
}

}  // namespace fastamp::ops

#define FASTAMP_REGISTER_OP(Op)                     \
  [[maybe_unused]] const bool g_##Op##_registered = \
      ::fastamp::ops::register_op<Op>(__FILE__, __LINE__)
