// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "optim/checkpoint.h"

#include <fastamp/optim/stored_state.h>

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <tuple>

namespace fastamp::optim {

/// Writes options under LibTorch's names; those that it does not have come beside them, where
/// LibTorch's loader does not look.
template <typename Options>
void write_extras(torch::serialize::OutputArchive& archive, const Options& options) {
  if constexpr (requires { options.maximize(); }) {
    archive.write("maximize", c10::IValue(options.maximize()));
  }
  archive.write("state_dtype", c10::IValue(static_cast<std::int64_t>(options.state_dtype())));
  archive.write("master", c10::IValue(static_cast<std::int64_t>(options.master())));
}

template <typename Options>
void read_extras(torch::serialize::InputArchive& archive, Options& options) {
  c10::IValue value;
  if constexpr (requires { options.maximize(); }) {
    if (archive.try_read("maximize", value)) {
      options.maximize(value.toBool());
    }
  }
  if (archive.try_read("state_dtype", value)) {
    options.state_dtype(static_cast<c10::ScalarType>(value.toInt()));
  }
  if (archive.try_read("master", value)) {
    options.master(static_cast<MasterStorage>(value.toInt()));
  }
}

template <typename Options>
void write_adam_options(torch::serialize::OutputArchive& archive, const Options& options) {
  archive.write("lr", c10::IValue(options.lr()));
  archive.write("betas", c10::IValue(options.betas()));
  archive.write("eps", c10::IValue(options.eps()));
  archive.write("weight_decay", c10::IValue(options.weight_decay()));
  archive.write("amsgrad", c10::IValue(options.amsgrad()));
  archive.write("state_rounding", c10::IValue(static_cast<std::int64_t>(options.state_rounding())));
  write_extras(archive, options);
}

template <typename Options>
void read_adam_options(const char* function, torch::serialize::InputArchive& archive,
                       Options& options) {
  options.lr(read_entry(archive, function, "lr").toDouble());
  options.betas(read_entry(archive, function, "betas").template to<std::tuple<double, double>>());
  options.eps(read_entry(archive, function, "eps").toDouble());
  options.weight_decay(read_entry(archive, function, "weight_decay").toDouble());
  options.amsgrad(read_entry(archive, function, "amsgrad").toBool());
  if (c10::IValue value; archive.try_read("state_rounding", value)) {
    options.state_rounding(static_cast<StateRounding>(value.toInt()));
  }
  read_extras(archive, options);
}

}  // namespace fastamp::optim
