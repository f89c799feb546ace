// SPDX-License-Identifier: Apache-2.0
#include "optim/checkpoint.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>

namespace fastamp::optim {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr const char* kVersion = "1.5.0";  // Of the layout: LibTorch has never changed it since.

std::string id_of(const void* impl) {
  return std::to_string(reinterpret_cast<std::uintptr_t>(impl));
}

at::Tensor count_tensor(std::size_t count) {
  return at::scalar_tensor(static_cast<std::int64_t>(count), at::TensorOptions(at::kLong));
}

std::size_t read_count(InputArchive& archive, const char* function, const std::string& key) {
  at::Tensor count;
  TORCH_CHECK(archive.try_read(key, count), function,
              ": expected the archive of an optimizer, got one without an entry \"", key, "\"");
  return static_cast<std::size_t>(count.item<std::int64_t>());
}

InputArchive read_archive(InputArchive& archive, const char* function, const std::string& key) {
  InputArchive inner;
  TORCH_CHECK(archive.try_read(key, inner), function,
              ": expected the archive of an optimizer, got one without an entry \"", key, "\"");
  return inner;
}

}  // namespace

c10::IValue read_entry(InputArchive& archive, const char* function, const std::string& key) {
  c10::IValue value;
  TORCH_CHECK(archive.try_read(key, value), function,
              ": expected an archive of this optimizer, got one without an entry \"", key, "\"");
  return value;
}

InputArchive read_states(const char* function, InputArchive& archive) {
  c10::IValue version;
  TORCH_CHECK(archive.try_read("pytorch_version", version) && version.isString() &&
                  version.toStringRef() == kVersion,
              function, ": expected an optimizer saved by LibTorch 1.5 or newer or by fastamp, ",
              "got an archive without pytorch_version = \"", kVersion, "\"");
  return read_archive(archive, function, "state");
}

std::vector<SavedGroup> read_groups(const char* function, InputArchive& archive,
                                    const torch::optim::Optimizer& optimizer) {
  auto inner = read_archive(archive, function, "param_groups");
  const auto& groups = optimizer.param_groups();
  const auto count = read_count(inner, function, "param_groups/size");
  TORCH_CHECK_VALUE(count == groups.size(), function, ": expected ", groups.size(),
                    " parameter groups, got ", count);
  std::vector<SavedGroup> saved(count);
  for (std::size_t i = 0; i < count; ++i) {
    auto group = read_archive(inner, function, "param_groups/" + std::to_string(i));
    const auto params = read_count(group, function, "params/size");
    TORCH_CHECK_VALUE(params == groups[i].params().size(), function, ": expected ",
                      groups[i].params().size(), " parameters in group ", i, ", got ", params);
    for (std::size_t j = 0; j < params; ++j) {
      saved[i].ids.push_back(
          read_entry(group, function, "params/" + std::to_string(j)).toStringRef());
    }
    saved[i].options = read_archive(group, function, "options");
  }
  return saved;
}

void write_optimizer(OutputArchive& archive, const torch::optim::Optimizer& optimizer,
                     bool (*skip)(const torch::optim::OptimizerParamState& state),
                     const StateMap& more) {
  archive.write("pytorch_version", c10::IValue(kVersion));
  OutputArchive states(archive.compilation_unit());
  for (const auto* map : {&optimizer.state(), &more}) {
    for (const auto& [impl, state] : *map) {
      if (!skip(*state)) {
        OutputArchive entry(states.compilation_unit());
        state->serialize(entry);
        states.write(id_of(impl), entry);
      }
    }
  }
  archive.write("state", states);
  OutputArchive groups(archive.compilation_unit());
  groups.write("param_groups/size", count_tensor(optimizer.param_groups().size()));
  for (std::size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    const auto& group = optimizer.param_groups()[i];
    OutputArchive inner(groups.compilation_unit());
    inner.write("params/size", count_tensor(group.params().size()));
    for (std::size_t j = 0; j < group.params().size(); ++j) {
      inner.write("params/" + std::to_string(j),
                  c10::IValue(id_of(group.params()[j].unsafeGetTensorImpl())));
    }
    OutputArchive options(inner.compilation_unit());
    group.options().serialize(options);
    inner.write("options", options);
    groups.write("param_groups/" + std::to_string(i), inner);
  }
  archive.write("param_groups", groups);
}

at::Tensor fitted(const char* function, const char* name, const at::Tensor& loaded,
                  const at::Tensor& param, at::ScalarType dtype) {
  if (!loaded.defined()) {
    return loaded;
  }
  TORCH_CHECK_VALUE(loaded.sizes() == param.sizes(), function, ": expected ", name, " of shape ",
                    param.sizes(), ", that of its parameter, got ", loaded.sizes());
  auto tensor = zeros_for(param, dtype);
  tensor.copy_(loaded);
  return tensor;
}

}  // namespace fastamp::optim
