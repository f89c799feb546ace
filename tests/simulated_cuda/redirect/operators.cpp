// SPDX-License-Identifier: Apache-2.0
#include "simulated_cuda/redirect/operators.h"

#include "simulated_cuda/redirect/random.h"
#include "simulated_cuda/redirect/views.h"
#include "simulated_cuda/simulated_cuda.h"

#include <ATen/ATen.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace simulated_cuda {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

template <typename Visit>
void each_tensor(const IValue& value, const Visit& visit) {
  const auto visit_defined = [&](const Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
  };
  if (value.isTensor()) {
    visit_defined(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorList()) visit_defined(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor> tensor : value.toOptionalTensorList()) {
      visit_defined(tensor.value_or(Tensor()));
    }
  }
}

/// A value with each of its tensors replaced.
template <typename Replace>
IValue with_tensors(const IValue& value, const Replace& replace) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(replace(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& tensor : value.toTensorList()) made.push_back(replace(tensor));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor> tensor : value.toOptionalTensorList()) {
      made.push_back(tensor.has_value() ? std::optional<Tensor>(replace(*tensor)) : tensor);
    }
    return made;
  }
  return value;
}

/// Operators that take tensors of the CPU with dimensions beside those of the device.
bool takes_cpu_tensors(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::copy_",      "aten::index.Tensor", "aten::index.Tensor_out", "aten::_index_put_impl_",
      "aten::index_put_", "aten::index_put"};
  return names.count(name) != 0 || name.rfind("aten::_foreach", 0) == 0;
}

/// Operators that wait for the device, which knows the shape or the value of their result.
bool waits_for_device(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::bincount",           "aten::equal",
      "aten::masked_select",      "aten::nonzero",
      "aten::_unique2",           "aten::repeat_interleave.Tensor",
      "aten::unique_consecutive", "aten::unique_dim"};
  return names.count(name) != 0;
}

/// The device of a call. Throws where its tensors are on several.
c10::Device device_of_call(const Stack& values, const std::string& name) {
  std::optional<c10::Device> device;
  std::optional<c10::Device> other;
  for (const auto& value : values) {
    if (value.isDevice() && !device) device = value.toDevice();
    each_tensor(value, [&](const Tensor& tensor) {
      if (!tensor.is_cuda()) {
        if (tensor.dim() != 0) other = tensor.device();
      } else if (!device) {
        device = tensor.device();
      } else if (*device != tensor.device()) {
        other = tensor.device();
      }
    });
  }
  TORCH_CHECK(!other || !device || takes_cpu_tensors(name),
              "Expected all tensors to be on the same device, but found at least two devices, ",
              *device, " and ", *other, "! (simulated CUDA, ", name, ")");
  return device && device->has_index() ? *device
                                       : c10::Device(c10::kCUDA, c10::cuda::current_device());
}

struct Call {
  c10::OperatorHandle op;
  bool sparse = false;
  bool seeded = false;
};

Stack run_on_cpu(const Call& call, Stack arguments) {
  const BelowAutograd below;
  const auto key = call.sparse ? c10::DispatchKey::SparseCPU : c10::DispatchKey::CPU;
  call.op.redispatchBoxed(c10::DispatchKeySet(key), &arguments);
  return arguments;
}

/// Dropout by a generator of its own: another thread may give the CPU's another state meanwhile, as
/// checkpoints do that restore one.
Stack run_dropout(const Stack& arguments, std::uint64_t seed) {
  const BelowAutograd below;
  const Tensor input = arguments[0].toTensor();
  const double kept = 1.0 - arguments[1].toDouble();
  Tensor mask = at::ones_like(input, input.options().dtype(at::kBool));
  if (!arguments[2].toOptional<bool>().value_or(true)) return {input.clone(), mask};
  mask.bernoulli_(kept, cpu_generator(seed));
  return {input.mul(mask).mul_(kept == 0.0 ? 0.0 : 1.0 / kept), mask};
}

Stack run_seeded(const Call& call, Stack arguments, std::uint64_t seed) {
  if (!call.seeded) {
    return run_on_cpu(call, std::move(arguments));
  }
  if (call.op.operator_name().name == "aten::native_dropout") {
    return run_dropout(arguments, seed);
  }
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto& type = call.op.schema().arguments()[i].type();
    if (type->str().find("Generator") != std::string::npos) {
      arguments[i] = cpu_generator(seed);
      return run_on_cpu(call, std::move(arguments));
    }
  }
  const CpuSeed instead(seed);
  return run_on_cpu(call, std::move(arguments));
}

/// The same; threads that draw random numbers take turns, since the CPU has one generator. Not for
/// replays of graphs, which hold the runtime's lock already.
Stack run_in_turn(const Call& call, Stack arguments, std::uint64_t seed) {
  static auto* const mutex = new std::mutex();
  std::unique_lock<std::mutex> turn(*mutex, std::defer_lock);
  if (call.seeded) turn.lock();
  return run_seeded(call, std::move(arguments), seed);
}

/// A result's memory on the device, which replays of a graph write.
struct Output {
  void* to;
  std::size_t result;
  std::size_t item;
  std::size_t bytes;
};

/// Adds a call to the graph that its stream is captured for.
void record_call(cudaStream_t stream, const Call& call, const Stack& arguments,
                 std::vector<Output> outputs, c10::DeviceIndex device) {
  const auto work = [call, arguments, outputs = std::move(outputs), device] {
    const auto seed = call.seeded ? next_seed({}, device, true) : 0;
    const Stack results = run_seeded(call, arguments, seed);
    for (const auto& output : outputs) {
      std::size_t item = 0;
      each_tensor(results[output.result], [&](const Tensor& tensor) {
        void* const to = host_view(output.to);
        if (item++ == output.item && tensor.data_ptr() != to && output.bytes != 0) {
          std::memcpy(to, tensor.data_ptr(), output.bytes);
        }
      });
    }
  };
  record(stream, work, toString(call.op.operator_name()).c_str());
}

Stack pop_arguments(const c10::OperatorHandle& op, Stack* stack) {
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  Stack values(first, stack->end());
  stack->erase(first, stack->end());
  return values;
}

std::optional<at::Generator> generator_in(const Stack& values) {
  for (const auto& value : values) {
    if (value.isGenerator()) return value.toGenerator();
  }
  return std::nullopt;
}

/// Before the operator: what its stream has waiting, and whether it is captured.
bool prepare(cudaStream_t stream, const std::string& name) {
  const bool capturing = is_capturing(stream);
  redirect_newcomers();
  count_operator();
  if (traces()) {
    std::fprintf(stderr, "simulated CUDA: [%p%s] %s\n", static_cast<void*>(stream),
                 capturing ? " captured" : "", name.c_str());
  }
  if (waits_for_device(name)) {
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  }
  if (!capturing) {
    flush(stream);
  }
  return capturing;
}

}  // namespace

void run_operator(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  const auto name = toString(op.operator_name());
  const Stack values = pop_arguments(op, stack);
  const auto device = device_of_call(values, name);
  const c10::cuda::CUDAGuard guard(device);
  cudaStream_t const stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  const bool capturing = prepare(stream, name);

  Views views;
  Stack arguments;
  for (const auto& value : values) {
    arguments.push_back(value.isDevice() ? IValue(c10::Device(c10::kCPU))
                                         : with_tensors(value, [&](const Tensor& tensor) {
                                             return views.to_host(tensor);
                                           }));
  }
  const Call call{op, views.has_sparse(), op.hasTag(at::Tag::nondeterministic_seeded)};
  TORCH_CHECK(!capturing || !call.sparse, "simulated CUDA: no sparse tensors in graphs");
  const auto seed = call.seeded ? next_seed(generator_in(values), device.index(), capturing) : 0;
  const Stack results = run_in_turn(call, arguments, seed);
  views.hand_back();

  std::vector<Output> outputs;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const BelowAutograd below;
    const IValue value = with_tensors(
        results[i], [&](const Tensor& tensor) { return views.to_device(tensor, device); });
    std::size_t item = 0;
    each_tensor(value, [&](const Tensor& tensor) {
      if (capturing) outputs.push_back({tensor.data_ptr(), i, item++, bytes_of(tensor)});
    });
    stack->push_back(value);
  }
  if (capturing) {
    views.release();
    record_call(stream, call, arguments, std::move(outputs), device.index());
  }
}

void run_convolution(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  const auto dtype = first->toTensor().scalar_type();
  const auto cast = [&](at::ScalarType from, at::ScalarType to, Stack::iterator begin) {
    const BelowAutograd below;
    for (auto value = begin; value != stack->end(); ++value) {
      *value = with_tensors(*value, [&](const Tensor& tensor) {
        return tensor.scalar_type() == from ? tensor.to(to) : tensor;
      });
    }
  };
  const auto before = first - stack->begin();
  if (dtype != at::kHalf && dtype != at::kBFloat16) {
    run_operator(op, keys, stack);
    return;
  }
  cast(dtype, at::kFloat, first);
  run_operator(op, keys, stack);
  cast(at::kFloat, dtype, stack->begin() + before);
}

/// Copies that are no more than a memcpy are torch's own code over the runtime.
void run_copy(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const Tensor self = (*stack)[stack->size() - 3].toTensor();
  const Tensor source = (*stack)[stack->size() - 2].toTensor();
  const bool plain = self.dtype() == source.dtype() && self.sizes() == source.sizes() &&
                     self.strides() == source.strides() && self.is_non_overlapping_and_dense() &&
                     self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  if (self.device() == source.device() && !plain) {
    run_operator(op, keys, stack);
    return;
  }
  const bool non_blocking = stack->back().toBool();
  stack->resize(stack->size() - 3);
  Tensor to = self;
  at::native::copy_(to, source, non_blocking);
  stack->emplace_back(self);
}

at::Tensor run_by_name(const char* name, Stack arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  run_operator(op, {}, &arguments);
  return arguments.front().toTensor();
}

}  // namespace simulated_cuda
