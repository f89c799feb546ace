// SPDX-License-Identifier: Apache-2.0
#pragma once

// What archives of torch::save keep of past iterations, of scalers and step guards.

#include <fastamp/scaler/reports.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <string>
#include <vector>

namespace fastamp::scaler {

/// Reads an entry that has to be there.
/// @param function  Named in errors, "Class::load".
/// @throws c10::Error
c10::IValue read_entry(const std::string& function, torch::serialize::InputArchive& archive,
                       const std::string& key);

/// A history as float64 [n, 5].
at::Tensor history_tensor(const std::vector<StepRecord>& history);
/// @throws c10::ValueError
std::vector<StepRecord> history_in_archive(const std::string& function, const at::Tensor& tensor);

void write_report(torch::serialize::OutputArchive& archive, const OverflowReport& report);
/// An empty one if there is none.
/// @throws c10::ValueError
OverflowReport read_report(const std::string& function, torch::serialize::InputArchive& archive);

}  // namespace fastamp::scaler
