// SPDX-License-Identifier: Apache-2.0
#include "autocast/cured_calls.h"

#include "core/interception.h"
#include "core/thread_bound.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>

#include <bit>
#include <map>
#include <utility>

namespace fastamp::autocast {
namespace {

/// Greatest number of calls that are remembered: shapes may change with every batch.
constexpr std::size_t kMostRemembered = 1024;

using CuredCalls = std::map<CallSignature, c10::ScalarType>;

/// Kind of an argument; its number comes before those of what it holds.
enum class Kind : std::uint8_t { kTensor, kList, kInt, kBool, kDouble, kDevice, kString, kNone };

class SignatureWriter {
 public:
  void add(Kind kind) { words_.push_back(static_cast<std::int64_t>(kind)); }

  void add(std::int64_t number) { words_.push_back(number); }

  void add(const at::Tensor& tensor) {
    if (intercepts_ops(tensor) || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() ||
        tensor.layout() != at::kStrided || tensor.is_nested()) {
      is_complete_ = false;
      return;
    }
    add(static_cast<std::int64_t>(tensor.scalar_type()));
    add(static_cast<std::int64_t>(tensor.key_set().raw_repr()));
    add(tensor.requires_grad() ? 1 : 0);
    add(tensor.dim());
    for (const auto numbers : {tensor.sizes(), tensor.strides()}) {
      words_.insert(words_.end(), numbers.begin(), numbers.end());
    }
  }

  void add(const c10::IValue& value) {
    if (value.isTensor()) {
      add(Kind::kTensor);
      add(value.toTensor().defined() ? 1 : 0);
      if (value.toTensor().defined()) {
        add(value.toTensor());
      }
    } else if (value.isList()) {
      add(Kind::kList);
      add(static_cast<std::int64_t>(value.toListRef().size()));
      for (const c10::IValue& element : value.toListRef()) {
        add(element);
      }
    } else if (value.isInt()) {
      add(Kind::kInt);
      add(value.toInt());
    } else if (value.isBool()) {
      add(Kind::kBool);
      add(value.toBool() ? 1 : 0);
    } else if (value.isDouble()) {
      add(Kind::kDouble);
      add(std::bit_cast<std::int64_t>(value.toDouble()));
    } else if (value.isDevice()) {
      add(Kind::kDevice);
      add(static_cast<std::int64_t>(std::hash<c10::Device>()(value.toDevice())));
    } else if (value.isString()) {
      add(Kind::kString);
      add(static_cast<std::int64_t>(value.toStringRef().size()));
      words_.insert(words_.end(), value.toStringRef().begin(), value.toStringRef().end());
    } else {
      add(Kind::kNone);
      is_complete_ = is_complete_ && value.isNone();
    }
  }

  bool is_complete() const { return is_complete_; }
  CallSignature take() { return std::move(words_); }

 private:
  CallSignature words_;
  bool is_complete_ = true;
};

}  // namespace

std::optional<CallSignature> signature_of(const c10::FunctionSchema& schema,
                                          c10::DispatchKeySet below, BoxedArguments arguments,
                                          c10::ScalarType lower) {
  if (is_intercepted()) {
    return std::nullopt;
  }
  SignatureWriter call;
  call.add(static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(&schema)));
  call.add(static_cast<std::int64_t>(below.raw_repr()));
  call.add(static_cast<std::int64_t>(lower));
  call.add(at::GradMode::is_enabled() ? 1 : 0);
  call.add(at::globalContext().deterministicAlgorithms() ? 1 : 0);
  for (const auto& argument : arguments) {
    call.add(argument);
  }
  return call.is_complete() ? std::optional(call.take()) : std::nullopt;
}

std::optional<c10::ScalarType> remembered_cure(const CallSignature& call) {
  const auto* const calls = PerThread<CuredCalls>::get();
  if (calls == nullptr) {
    return std::nullopt;
  }
  const auto found = calls->find(call);
  return found == calls->end() ? std::nullopt : std::optional(found->second);
}

void remember_cure(CallSignature call, c10::ScalarType to) {
  auto& calls = PerThread<CuredCalls>::make();
  if (calls.size() >= kMostRemembered) {
    calls.clear();
  }
  calls.insert_or_assign(std::move(call), to);
}

}  // namespace fastamp::autocast
