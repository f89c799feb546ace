// SPDX-License-Identifier: Apache-2.0
#include "autocast/unify.h"

#include "autocast/arguments.h"
#include "autocast/boxed_arguments.h"
#include "autocast/cured_calls.h"
#include "autocast/op_policy.h"
#include "autocast/torch_state.h"
#include "autocast/trace.h"
#include "core/interception.h"
#include "trace/events.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

namespace fastamp::autocast {
namespace {

// -- What a call is given

/// Dtypes as bits.
using DtypeSet = std::uint32_t;

constexpr DtypeSet kFloat32Bit = 1;
constexpr DtypeSet kHalfBit = 2;
constexpr DtypeSet kBFloat16Bit = 4;
constexpr DtypeSet kUnified = kFloat32Bit | kHalfBit | kBFloat16Bit;
/// float64, and complex numbers: no autocast casts them.
constexpr DtypeSet kWideBit = 8;
/// float8 and smaller: codes that mean nothing without their scales.
constexpr DtypeSet kCodesBit = 16;

DtypeSet bit_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
      return kFloat32Bit;
    case c10::kHalf:
      return kHalfBit;
    case c10::kBFloat16:
      return kBFloat16Bit;
    case c10::kDouble:
      return kWideBit;
    default:
      if (c10::isFloatingType(dtype)) {
        return kCodesBit;
      }
      return c10::isComplexType(dtype) ? kWideBit : 0;
  }
}

DtypeSet dtypes_of(BoxedArguments arguments, PolicyDevice device) {
  DtypeSet seen = 0;
  for_each_tensor(arguments, [&](const at::Tensor& tensor) {
    if (is_on(tensor, device)) {
      seen |= bit_of(tensor.scalar_type());
    }
  });
  return seen;
}

bool is_mixed(DtypeSet dtypes) {
  return std::popcount(dtypes & kUnified) > 1 && (dtypes & kCodesBit) == 0;
}

// -- What it can be given instead

/// Arguments that ops write though their schemas do not say so: a cast would take their place.
bool is_kept(const c10::Argument& argument) {
  return is_written(argument) || argument.name() == "running_mean" ||
         argument.name() == "running_var";
}

/// Whether the results of an op tell more in float32: those that torch's lists of one of the
/// devices run in float32 or promote, comparisons, and linear algebra, which has few kernels and no
/// backward passes in 16 bits.
bool is_wide_first(const std::string& name) {
  static const auto names = [] {
    std::unordered_set<std::string> wide{"aten::allclose", "aten::bucketize", "aten::equal",
                                         "aten::isclose", "aten::searchsorted"};
    for (std::size_t op = 0; op < kNumOps; ++op) {
      for (const auto device : {PolicyDevice::kCpu, PolicyDevice::kCuda}) {
        const auto policy = default_policy(static_cast<OpId>(op), device);
        if (policy == OpPolicy::kFp32 || policy == OpPolicy::kPromote) {
          wide.insert(kernel_entries()[op].name);
        }
      }
    }
    return wide;
  }();
  return names.contains(name) || name.starts_with("aten::linalg_");
}

/// Dtypes to repeat a refused call in, in this order: that of what is written, else the region's
/// and float32.
std::vector<c10::ScalarType> dtypes_to_try(const c10::FunctionSchema& schema,
                                           BoxedArguments arguments, PolicyDevice device) {
  DtypeSet written = 0;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (is_written(schema.arguments()[i])) {
      written |= dtypes_of(arguments.slice(i, 1), device);
    }
  }
  if (written != 0) {
    switch (written) {
      case kFloat32Bit:
        return {c10::kFloat};
      case kHalfBit:
        return {c10::kHalf};
      case kBFloat16Bit:
        return {c10::kBFloat16};
      default:
        return {};
    }
  }
  const auto lower = region_dtype(device_type(device));
  if ((bit_of(lower) & (kHalfBit | kBFloat16Bit)) == 0) {
    return {c10::kFloat};
  }
  return is_wide_first(schema.name()) ? std::vector{c10::kFloat, lower}
                                      : std::vector{lower, c10::kFloat};
}

// -- What is tried instead

/// Keys of what records calls: torch.jit.trace, and the modes and wrappers of compilers.
constexpr c10::DispatchKeySet kRecorders({c10::DispatchKey::Tracer, c10::DispatchKey::Python,
                                          c10::DispatchKey::PythonTLSSnapshot,
                                          c10::DispatchKey::PythonDispatcher,
                                          c10::DispatchKey::PreDispatch,
                                          c10::DispatchKey::Functionalize});

std::atomic<StandInMaker> g_stand_in_maker{nullptr};

/// Whether a value is or has a number that a compiler has given a name: a kernel would fix it.
bool has_symbols(const c10::IValue& value) {
  if (value.isList()) {
    return std::ranges::any_of(value.toListRef(), has_symbols);
  }
  return value.isSymInt() || value.isSymFloat() || value.isSymBool();
}

/// Arguments for a call that nobody records; none if this one is not recorded either, or has
/// tensors that nothing can stand in for.
std::optional<torch::jit::Stack> stand_ins(const c10::FunctionSchema& schema,
                                           BoxedArguments arguments, c10::DispatchKeySet below) {
  if (below.has(c10::DispatchKey::Tracer)) {
    torch::jit::Stack copies = arguments.vec();
    for (std::size_t i = 0; i < copies.size(); ++i) {
      if (is_written(schema.arguments()[i]) && copies[i].isTensor()) {
        copies[i] = copies[i].toTensor().detach().clone();
      }
    }
    return copies;
  }
  const StandInMaker maker = g_stand_in_maker.load(std::memory_order_acquire);
  if (maker == nullptr || !is_intercepted(below)) [[likely]] {
    return std::nullopt;
  }
  bool is_complete = std::ranges::none_of(arguments, has_symbols);
  const auto stand_in = [&](const at::Tensor& tensor) {
    at::Tensor made = is_complete ? maker(tensor) : at::Tensor();
    is_complete = is_complete && made.defined();
    return made;
  };
  torch::jit::Stack made;
  for (const auto& argument : arguments) {
    made.push_back(replace_tensors(argument, stand_in));
  }
  return is_complete ? std::optional(std::move(made)) : std::nullopt;
}

/// The arguments in a dtype; none if that changes nothing.
std::optional<std::vector<c10::IValue>> cast_to(const c10::FunctionSchema& schema,
                                                BoxedArguments arguments, const Caster& caster) {
  std::vector<c10::IValue> cast;
  cast.reserve(arguments.size());
  bool changes = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const bool stays = is_kept(schema.arguments()[i]);
    if (!stays) {
      visit_tensors(arguments[i],
                    [&](const at::Tensor& tensor) { changes = changes || caster.wants(tensor); });
    }
    cast.push_back(stays ? arguments[i] : replace_tensors(arguments[i], caster));
  }
  return changes ? std::optional(std::move(cast)) : std::nullopt;
}

// -- Refusals

std::atomic<RefusalReader> g_refusal_reader{nullptr};

/// Calls the op. Returns what it threw, if that may be a refusal of its arguments; null if it ran.
std::exception_ptr refusal_of(const c10::OperatorHandle& op, c10::DispatchKeySet below,
                              torch::jit::Stack* stack) {
  try {
    op.redispatchBoxed(below, stack);
    return nullptr;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::AcceleratorError&) {
    throw;
  } catch (const c10::Error&) {
    return std::current_exception();
  } catch (const std::bad_alloc&) {
    throw;
  } catch (std::exception& error) {
    const RefusalReader reader = g_refusal_reader.load(std::memory_order_acquire);
    if (reader != nullptr && !reader(error)) {
      throw;
    }
    return std::current_exception();
  }
}

bool is_of_missing_kernel(const std::exception_ptr& refusal) {
  try {
    std::rethrow_exception(refusal);
  } catch (const c10::NotImplementedError&) {
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

/// Version counters of what a call writes: one that has moved shows an op that refused halfway.
class WrittenVersions {
 public:
  WrittenVersions(const c10::FunctionSchema& schema, BoxedArguments arguments) {
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (is_written(schema.arguments()[i])) {
        visit_tensors(arguments[i], [&](const at::Tensor& tensor) {
          if (!tensor.is_inference()) {
            found_.emplace_back(tensor, tensor._version());
          }
        });
      }
    }
  }

  bool moved() const {
    return std::ranges::any_of(
        found_, [](const auto& written) { return written.first._version() != written.second; });
  }

 private:
  std::vector<std::pair<at::Tensor, std::int64_t>> found_;
};

std::unique_ptr<TracedCall> traced(const c10::FunctionSchema& schema, BoxedArguments arguments,
                                   PolicyDevice device, c10::ScalarType to) {
  if (!is_traced()) [[likely]] {
    return nullptr;
  }
  TracedOp op = traced_op(kEveryOp, device);
  op.name = c10::toString(schema.operator_name());
  if (op.name.starts_with("aten::")) {
    op.name.erase(0, std::string_view("aten::").size());
  }
  op.policy = OpPolicy::kUnify;
  auto call = std::make_unique<TracedCall>(std::move(op));
  for_each_tensor(arguments, [&](const at::Tensor& tensor) { call->see(tensor); });
  call->see(std::optional(to));
  return call;
}

// -- Calls

/// Whether a call comes from inside an op that autograd has recorded, or that is being tried: with
/// another dtype there, the op's own would be wrong. Only a composite op has calls inside that are
/// as good as its caller's own.
thread_local bool t_is_inside = false;

bool is_inside_an_op() {
  const bool is_below_autograd =
      c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset) &&
      !c10::InferenceMode::is_enabled();
  return t_is_inside || is_below_autograd;
}

class Inside {
 public:
  explicit Inside(bool is_inside) : before_(std::exchange(t_is_inside, is_inside)) {}
  ~Inside() { t_is_inside = before_; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  Inside(Inside&&) = delete;
  Inside& operator=(Inside&&) = delete;

 private:
  bool before_;
};

/// A call with arguments of several dtypes.
class MixedCall {
 public:
  MixedCall(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack,
            PolicyDevice device)
      : op_(op),
        below_(below),
        stack_(stack),
        device_(device),
        given_(torch::jit::last(*stack, op.schema().arguments().size()).vec()),
        base_(stack->size() - given_.size()) {}

  /// Returns the dtype to which arguments were cast; none if the op took them as they were.
  /// @throws What the op threw at first, if it refuses all casts, too.
  std::optional<c10::ScalarType> run() {
    const auto signature = signature_of(op_.schema(), below_, given_, lower_);
    if (signature.has_value()) {
      const Inside inside(is_opaque());
      const auto known = remembered_cure(*signature);
      if (known.has_value()) {
        const auto trace = traced(op_.schema(), given_, device_, *known);
        if (put_cast(*known) && refusal() == nullptr) {
          return known;
        }
      }
    }
    const Outcome outcome = tried();
    if (outcome.refusal != nullptr) {
      std::rethrow_exception(outcome.refusal);
    }
    if (outcome.to.has_value() && signature.has_value()) {
      remember_cure(*signature, *outcome.to);
    }
    return outcome.to;
  }

  /// Runs the call where calls are recorded, by torch.jit.trace or a compiler, whose record of a
  /// call that fails is not to be used. So the op is tried with other arguments, of which nothing
  /// is recorded, and then called once.
  void run_recorded(torch::jit::Stack stand_ins) {
    std::optional<c10::ScalarType> to;
    {
      const c10::impl::ExcludeDispatchKeyGuard unrecorded(kRecorders);
      MixedCall call(op_, below_ - kRecorders, &stand_ins, device_);
      call.is_stand_in_ = true;
      const Outcome outcome = call.tried();
      // Zeros are no mask or index of the sizes that the call has.
      to = below_.has(c10::DispatchKey::Tracer) ? outcome.to : outcome.perhaps;
    }
    const Inside inside(is_opaque());
    const auto trace = to.has_value() ? traced(op_.schema(), given_, device_, *to) : nullptr;
    if (!to.has_value() || !put_cast(*to)) {
      put(given_);
    }
    op_.redispatchBoxed(below_, stack_);
  }

 private:
  struct Outcome {
    std::optional<c10::ScalarType> to;  ///< See run().
    std::exception_ptr refusal;         ///< What the op threw at first, if nothing helped.
    /// Dtype of all, or one for which the op has a kernel, which may have refused the values.
    std::optional<c10::ScalarType> perhaps;
  };

  /// Whether the calls that the op makes are not as good as its caller's own.
  bool is_opaque() const {
    return !op_.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  }

  Outcome tried() {
    const Inside inside(is_opaque());
    const WrittenVersions versions(op_.schema(), given_);
    put(given_);
    Outcome outcome{.to = {}, .refusal = refusal(), .perhaps = {}};
    if (outcome.refusal == nullptr || versions.moved()) {
      return outcome;
    }
    for (const auto to : dtypes_to_try(op_.schema(), given_, device_)) {
      const auto trace = is_stand_in_ ? nullptr : traced(op_.schema(), given_, device_, to);
      if (!put_cast(to)) {
        continue;
      }
      const auto refusal_of_cast = refusal();
      if (refusal_of_cast == nullptr) {
        return {.to = to, .refusal = nullptr, .perhaps = to};
      }
      if (!outcome.perhaps.has_value() && !is_of_missing_kernel(refusal_of_cast)) {
        outcome.perhaps = to;
      }
    }
    return outcome;
  }

  void put(BoxedArguments arguments) {
    stack_->resize(base_);
    stack_->insert(stack_->end(), arguments.begin(), arguments.end());
  }

  /// Puts the arguments in a dtype on the stack; false if that changes none.
  bool put_cast(c10::ScalarType to) {
    // Casts that are kept sum their gradients in 16 bits, which torch cannot in these layouts.
    const auto kept_if = holds_compressed() ? c10::ScalarType::Undefined : lower_;
    const auto arguments = cast_to(op_.schema(), given_, {to, kept_if, device_});
    if (arguments.has_value()) {
      put(*arguments);
    }
    return arguments.has_value();
  }

  bool holds_compressed() const {
    return std::ranges::any_of(given_, [](const c10::IValue& value) {
      return value.isTensor() && value.toTensor().unsafeGetTensorImpl()->is_sparse_compressed();
    });
  }

  /// Calls the op with what is on the stack.
  std::exception_ptr refusal() { return refusal_of(op_, below_, stack_); }

  const c10::OperatorHandle& op_;
  c10::DispatchKeySet below_;
  torch::jit::Stack* stack_;
  PolicyDevice device_;
  c10::ScalarType lower_ = region_dtype(device_type(device_));
  std::vector<c10::IValue> given_;
  std::size_t base_;
  bool is_stand_in_ = false;  ///< Made to find out what another call should be.
};

}  // namespace

bool can_unify(const c10::FunctionSchema& schema) {
  int tensors = 0;
  bool dispatched = false;
  for (const auto& argument : schema.arguments()) {
    const auto& type = *argument.type();
    if (!reaches_all_tensors(type) ||
        (is_written(argument) && type.kind() != c10::TypeKind::TensorType)) {
      return false;
    }
    dispatched = dispatched || is_dispatched(argument);
    if (holds_tensors(type)) {
      const bool holds_one = type.kind() == c10::TypeKind::TensorType ||
                             type.isSubtypeOf(*c10::OptionalType::ofTensor());
      tensors += holds_one ? 1 : 2;
    }
  }
  return dispatched && tensors > 1;
}

void call_unified(const c10::OperatorHandle& op, c10::DispatchKeySet below,
                  torch::jit::Stack* stack, PolicyDevice device) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  if (is_mixed(dtypes_of(arguments, device)) && !is_inside_an_op()) [[unlikely]] {
    MixedCall call(op, below, stack, device);
    auto tried = stand_ins(op.schema(), arguments, below);
    if (tried.has_value()) {
      call.run_recorded(std::move(*tried));
    } else {
      call.run();
    }
  } else {
    op.redispatchBoxed(below, stack);
  }
}

void set_stand_in_maker(StandInMaker maker) {
  g_stand_in_maker.store(maker, std::memory_order_release);
}

void set_refusal_reader(RefusalReader reader) {
  g_refusal_reader.store(reader, std::memory_order_release);
}

}  // namespace fastamp::autocast
