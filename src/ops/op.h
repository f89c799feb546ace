// SPDX-License-Identifier: Apache-2.0
#pragma once

// How an op is described to the dispatcher.
//
// An op is a struct with
//   Args             the arguments, as members in the order of the schema
//   kName            its name
//   kArguments       a tuple of FASTAMP_ARG(member, access, default), in the same order: from it
//                    come the schema, the signature and which versions a call bumps
//   check(args)      throws what the entry promises and reads no data; what it returns, if
//                    anything, is handed to the kernels
//   kCpu             the kernel: of Args, and of what check() returned
//   kCuda            where kernels::CudaKernels has the one for CUDA
//   device(args)     where the tensors are, for the refusal of other devices
// and FASTAMP_REGISTER_OP(the struct) registers all of it.

#include "core/tensor_version.h"
#include "kernels/cuda_kernels.h"

#include <ATen/core/List.h>
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
#include <tuple>
#include <type_traits>
#include <utility>

namespace fastamp::ops {

/// Effect of a call on an argument.
enum class Access : std::uint8_t {
  kRead,
  kWrite,
  kWriteGrads,  ///< Writes it, unless its write_grads is false.
};

/// An argument: its name and default in the schema, and the member of Args that holds it.
template <typename Get>
struct Argument {
  const char* name;
  Get get;
  Access access = Access::kRead;
  const char* fallback = nullptr;
};

/// The type of an argument in a schema.
/// @param alias  What marks it as written, or nothing.
template <typename T>
std::string schema_type(const std::string& alias) {
  if constexpr (std::is_same_v<T, at::TensorList>) {
    return "Tensor" + alias + "[]";
  } else if constexpr (std::is_same_v<T, at::Tensor>) {
    return "Tensor" + alias;
  } else if constexpr (std::is_same_v<T, at::IntArrayRef>) {
    return "int[]";
  } else if constexpr (std::is_same_v<T, at::ArrayRef<double>>) {
    return "float[]";
  } else if constexpr (std::is_same_v<T, c10::List<bool>>) {
    return "bool[]";
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    return "int";
  } else if constexpr (std::is_same_v<T, double>) {
    return "float";
  } else if constexpr (std::is_same_v<T, bool>) {
    return "bool";
  } else {
    return schema_type<typename T::value_type>(alias) + "?";
  }
}

template <typename T>
inline constexpr bool kIsOptional = false;
template <typename T>
inline constexpr bool kIsOptional<std::optional<T>> = true;

/// The schema of an op. Arguments from the first one with a default on are by name only; the
/// default of an optional one is None.
template <typename Op>
std::string schema_of() {
  std::string schema;
  char written = 'a';
  bool by_name = false;
  const auto append = [&](const auto& argument) {
    using T = std::remove_cvref_t<decltype(argument.get(std::declval<const typename Op::Args&>()))>;
    const char* const fallback =
        argument.fallback == nullptr && kIsOptional<T> ? "None" : argument.fallback;
    schema += schema.empty() ? "" : ", ";
    if (fallback != nullptr && !std::exchange(by_name, true)) {
      schema += "*, ";
    }
    schema +=
        schema_type<T>(argument.access == Access::kRead ? "" : std::string("(") + written++ + "!)");
    schema += std::string(" ") + argument.name;
    schema += fallback == nullptr ? "" : std::string("=") + fallback;
  };
  std::apply([&](const auto&... arguments) { (append(arguments), ...); }, Op::kArguments);
  return std::string(Op::kName) + "(" + schema + ") -> ()";
}

/// The Meta kernel: fake tensors and torch.compile call it.
template <typename Op>
void check_only(const typename Op::Args& args) {
  static_cast<void>(Op::check(args));
}

/// Refuses where there is no kernel (sparse gradients, other devices) the call fails with one
/// sentence about the argument, not with torch's list of backends.
template <typename Op>
void check_and_refuse(const typename Op::Args& args) {
  static_cast<void>(Op::check(args));
  const c10::Device device = Op::device(args);
  const std::string why_not = device.is_cuda() ? cuda_part_refusal() : "";
  TORCH_CHECK_NOT_IMPLEMENTED(false, Op::kName,
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

/// The functions of an op's own signature, T being the types of its arguments.
template <typename Op, typename Arguments = std::remove_const_t<decltype(Op::kArguments)>>
struct Signature;
template <typename Op, typename... Get>
struct Signature<Op, std::tuple<Argument<Get>...>> {
  using Args = Op::Args;
  template <typename G>
  using Type = std::invoke_result_t<G, const Args&>;

  /// Found once: a lookup costs a lock and a hash.
  static const auto& handle() {
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow((std::string("fastamp::") + Op::kName).c_str(), "")
            .template typed<void(Type<Get>...)>();
    return op;
  }

  /// Calls the op through the dispatcher.
  static void dispatch(const Args& args) {
    std::apply([&](const auto&... arguments) { handle().call(arguments.get(args)...); },
               Op::kArguments);
  }

  /// A dispatcher kernel made of a function that takes all arguments as one struct.
  template <auto kRun>
  static void call(Type<Get>... args) {
    kRun(Args{args...});
  }

  /// Runs the op below autograd's keys, then bumps the versions of what was written, so that
  /// backward notices an edited saved tensor and caches keyed on versions stay right. A call that
  /// throws bumps none.
  static void call_and_bump(c10::DispatchKeySet keys, Type<Get>... args) {
    handle().redispatch(keys & c10::after_ADInplaceOrView_keyset, args...);
    const Args all{args...};
    const auto bump = [&](const auto& argument) {
      if (writes(all, argument.access)) {
        bump_versions(argument.get(all));
      }
    };
    std::apply([&](const auto&... arguments) { (bump(arguments), ...); }, Op::kArguments);
  }

 private:
  static bool writes(const Args& args, Access access) {
    if constexpr (requires { args.write_grads; }) {
      return access == Access::kWrite || (access == Access::kWriteGrads && args.write_grads);
    }
    return access == Access::kWrite;
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

/// Body of a typed entry: calls the op through the dispatcher.
template <typename Op>
void call_op(const typename Op::Args& args) {
  Signature<Op>::dispatch(args);
}

/// Registers schema and kernels and never takes them back: while the process exits, other threads
/// may still call them. fastamp is linked so that dlclose() does not unload it.
template <typename Op>
bool register_op(const char* file, std::uint32_t line) {
  using c10::DispatchKey;
  using Own = Signature<Op>;
  auto* const library = new torch::Library(torch::Library::FRAGMENT, "fastamp",
                                           /*k=*/std::nullopt, file, line);
  library->def(schema_of<Op>().c_str(), {at::Tag::pt2_compliant_tag});
  const auto implement = [&](DispatchKey key, auto&& kernel) {
    library->impl(Op::kName, torch::dispatch(key, std::forward<decltype(kernel)>(kernel)));
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

/// An argument that is the member `name` of Args; access and default may follow.
#define FASTAMP_ARG(name, ...)                            \
  ::fastamp::ops::Argument {                              \
    #name, [](const Args& args) -> decltype(Args::name) { \
      return args.name;                                   \
    } __VA_OPT__(, ) __VA_ARGS__                          \
  }

#define FASTAMP_REGISTER_OP(Op)                     \
  [[maybe_unused]] const bool g_##Op##_registered = \
      ::fastamp::ops::register_op<Op>(__FILE__, __LINE__)
