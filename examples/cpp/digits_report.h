// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the digits example shows beside its training loop: options, data, progress, measurements
// and the table.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace digits {

struct Options {
  std::string data;                             // what examples/data/digits.py wrote
  std::int64_t iters = 2000;                    // iterations, at most
  std::map<std::string, std::int64_t> shorter;  // fewer of them, by mode
  std::vector<std::int64_t> marks = {1};        // iterations whose loss is shown
  double until_loss = 0;                        // stop at this loss
  std::string json;                             // also write the table to this file
};

/// Reads the command line; throws std::invalid_argument with the usage.
Options parse_options(int argc, char** argv);

struct Data {
  at::Tensor x;                             // float32 (1797, 64)
  at::Tensor y;                             // int64 (1797)
  std::map<std::string, at::Tensor> model;  // initial weights by parameter name
};

/// Reads what examples/data/digits.py wrote, a file of Python's torch.save, onto the device.
Data read_data(const std::string& path, c10::Device device);

/// Sets the parameters of the module to those of the file.
void load_parameters(torch::nn::Module& module, const Data& data);

struct SeenDtypes {
  c10::ScalarType input = c10::ScalarType::Undefined;
  c10::ScalarType output = c10::ScalarType::Undefined;
  c10::ScalarType weight = c10::ScalarType::Undefined;
};

/// One training run: given every iteration, returns whether there is another.
class Row {
 public:
  Row(const Options& options, c10::Device device, const std::string& mode, bool scaled);

  /// Takes the loss of an iteration, which is read only where it is shown.
  void record(const at::Tensor& loss);
  /// Shows the progress; false once the iterations are done or the target loss is reached.
  bool goes_on();
  /// Takes what the trained model's fc1 saw, its accuracy, the scale at the end and how many steps
  /// were skipped.
  void finish(const SeenDtypes& seen, const at::Tensor& accuracy, double scale,
              std::int64_t skipped);

  /// The row as it is printed: column and text.
  std::vector<std::pair<std::string, std::string>> cells() const;
  /// The row as one JSON object.
  std::string json() const;

 private:
  void show_progress(bool last);
  void wait() const;

  const Options& options_;
  c10::Device device_;
  std::string mode_;
  bool scaled_;
  std::int64_t total_;  // iterations, at most
  at::Tensor loss_;
  std::int64_t iteration_ = 0;
  std::int64_t skipped_ = 0;
  std::int64_t timed_from_ = 0;
  std::chrono::steady_clock::time_point begun_, started_, shown_;
  std::map<std::int64_t, double> losses_;
  double shown_loss_ = 0;
  double ms_per_iteration_ = 0;
  std::optional<double> peak_mib_;
  SeenDtypes seen_;
  double final_loss_ = 0;
  double accuracy_ = 0;
  double scale_ = 0;
};

/// The rows of all runs, and the table of them.
class Report {
 public:
  Report(Options options, c10::Device device);
  /// The row that watches a run; valid as long as the report.
  Row& add_row(const std::string& mode, bool scaled);
  /// How many iterations a run has at most.
  std::int64_t iterations() const { return options_.iters; }
  /// Prints the table, and writes the file if one was asked for.
  void print() const;

 private:
  Options options_;
  c10::Device device_;
  std::deque<Row> rows_;  // references to its elements stay valid
};

}  // namespace digits
