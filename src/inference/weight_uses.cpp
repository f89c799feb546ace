// SPDX-License-Identifier: Apache-2.0
#include "inference/weight_uses.h"

#include "autocast/op_names.h"
#include "autocast/op_policy.h"
#include "autocast/op_table.h"
#include "autocast/torch_state.h"

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <optional>

namespace fastamp::autocast {
namespace {

thread_local WeightUses* t_watcher = nullptr;

/// A call that is running and reads no weight, whatever it calls inside.
struct Begun : at::ObserverContext {
  explicit Begun(int& begun) : counter(begun) { ++counter; }
  int& counter;
};

std::unique_ptr<at::ObserverContext> begin_call(const at::RecordFunction& call) {
  if (t_watcher == nullptr || t_watcher->casts_begun > 0) {
    return nullptr;
  }
  switch (t_watcher->see(call)) {
    case WeightUses::Reading::kCast:
      return std::make_unique<Begun>(t_watcher->casts_begun);
    case WeightUses::Reading::kView:
      return std::make_unique<Begun>(t_watcher->views_begun);
    default:
      return nullptr;
  }
}

void end_call(const at::RecordFunction& /*call*/, at::ObserverContext* begun) {
  if (begun != nullptr && t_watcher != nullptr) {
    --static_cast<Begun*>(begun)->counter;
  }
}

const void* storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage()
             ? static_cast<const void*>(tensor.storage().unsafeGetStorageImpl())
             : nullptr;
}

std::optional<PolicyDevice> policy_device_of(const at::Tensor& tensor) {
  for (const PolicyDevice device : {PolicyDevice::kCpu, PolicyDevice::kCuda}) {
    if (is_on(tensor, device)) {
      return device;
    }
  }
  return std::nullopt;
}

/// Whether ops that this thread calls with the tensor reach their autocast kernels.
bool is_autocast(PolicyDevice device) {
  return !c10::impl::tls_is_dispatch_key_excluded(autocast_key(device));
}

bool sets_strides(const c10::FunctionSchema& schema) { return schema.name() == "aten::as_strided"; }

bool is_view(const c10::FunctionSchema& schema) {
  const auto is_alias = [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr;
  };
  const bool is_of_bits = schema.name() == "aten::view" && schema.overload_name() == "dtype";
  // Strides over a storage that a cast does not have.
  return !is_of_bits && !sets_strides(schema) && !schema.is_mutable() &&
         std::ranges::any_of(schema.returns(), is_alias);
}

bool is_cast_to(const c10::FunctionSchema& schema, c10::ArrayRef<const c10::IValue> inputs,
                c10::ScalarType dtype) {
  if (schema.name() != "aten::to" && schema.name() != "aten::_to_copy") {
    return false;
  }
  const auto argument =
      static_cast<std::size_t>(schema.argumentIndexWithName("dtype").value_or(-1));
  return argument < inputs.size() && inputs[argument].isInt() &&
         inputs[argument].toScalarType() == dtype;
}

void append_tensors(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isTensorList() || value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      append_tensors(element, tensors);
    }
  }
}

std::string joined(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

}  // namespace

WeightUses::WeightUses(const std::vector<at::Tensor>& weights) {
  TORCH_INTERNAL_ASSERT(t_watcher == nullptr);
  for (const at::Tensor& weight : weights) {
    const auto [at, is_new] = index_of_storage_.emplace(storage_of(weight), uses_.size());
    if (is_new) {
      uses_.emplace_back();
    }
    index_of_weight_.push_back(at->second);
    weights_.insert(weight.unsafeGetTensorImpl());
  }
  for (const OpId op : all_ops()) {
    ids_.emplace(full_name(op), op);
  }
  t_watcher = this;
  callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(begin_call, end_call)
                                             .needsInputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
}

WeightUses::~WeightUses() {
  at::removeCallback(callback_);
  t_watcher = nullptr;
}

std::vector<WeightUse> WeightUses::uses() const {
  std::vector<WeightUse> found;
  found.reserve(index_of_weight_.size());
  for (const std::size_t index : index_of_weight_) {
    found.push_back(uses_[index]);
  }
  return found;
}

WeightUses::Reading WeightUses::reading_of(const at::RecordFunction& call,
                                           const c10::FunctionSchema& schema,
                                           const at::Tensor& weight) const {
  if (is_view(schema) || (sets_strides(schema) && views_begun > 0)) {
    return Reading::kView;
  }
  const auto device = policy_device_of(weight);
  if (!device.has_value()) {
    return Reading::kRead;
  }
  const auto op = ids_.find(joined(schema.operator_name()));
  // Casts of _cudnn_rnn are made by a kernel of its own, into one buffer for all weights.
  if (op != ids_.end() && is_autocast(*device) && is_eligible(weight, *device) &&
      schema.name() != "aten::_cudnn_rnn" && policy_of(op->second, *device) == OpPolicy::kLower) {
    return Reading::kNone;  // It reads the cast.
  }
  const auto lower = region_dtype(device_type(*device));
  return is_cast_to(schema, call.inputs(), lower) ? Reading::kCast : Reading::kRead;
}

WeightUses::Reading WeightUses::see(const at::RecordFunction& call) {
  const auto schema = call.operator_schema();
  if (!schema.has_value()) {
    return Reading::kNone;  // Autograd's nodes, users' own ranges: ops inside are seen themselves.
  }
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& input : call.inputs()) {
    append_tensors(input, tensors);
  }
  Reading strongest = Reading::kNone;
  for (const at::Tensor& tensor : tensors) {
    const auto found = index_of_storage_.find(storage_of(tensor));
    if (found == index_of_storage_.end() || found->first == nullptr) {
      continue;
    }
    WeightUse& use = uses_[found->second];
    use.is_used = true;
    const Reading reading = reading_of(call, *schema, tensor);
    const auto device = policy_device_of(tensor);
    // The casts that autocast makes for its ops are made with its keys excluded.
    if ((reading == Reading::kCast || reading == Reading::kNone) && device.has_value() &&
        is_autocast(*device)) {
      const bool is_shared =
          reading == Reading::kNone && weights_.contains(tensor.unsafeGetTensorImpl());
      ++(is_shared ? use.casts : use.other_casts);
    }
    if (reading == Reading::kRead && use.read_by.empty()) {
      use.read_by = joined(schema->operator_name());
    }
    strongest = std::max(strongest, reading);
  }
  return strongest;
}

}  // namespace fastamp::autocast
