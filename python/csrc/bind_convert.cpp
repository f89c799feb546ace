// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "inference/weight_uses.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace fastamp::python {
namespace {

/// The fields of autocast::WeightUse.
using Use = std::tuple<bool, std::string, int, int>;

std::vector<Use> as_tuples(const autocast::WeightUses& watcher) {
  std::vector<Use> tuples;
  for (const auto& use : watcher.uses()) {
    tuples.emplace_back(use.is_used, use.read_by, use.casts, use.other_casts);
  }
  return tuples;
}

/// A watcher that Python starts and stops.
class WatchedWeights {
 public:
  explicit WatchedWeights(std::vector<at::Tensor> weights) : weights_(std::move(weights)) {}

  void start() { watcher_ = std::make_unique<autocast::WeightUses>(weights_); }

  std::vector<Use> stop() {
    const auto watcher = std::exchange(watcher_, nullptr);
    return watcher == nullptr ? std::vector<Use>() : as_tuples(*watcher);
  }

 private:
  std::vector<at::Tensor> weights_;
  std::unique_ptr<autocast::WeightUses> watcher_;
};

}  // namespace

void bind_convert(py::module_& module) {
  py::class_<WatchedWeights>(module, "WatchedWeights")
      .def(py::init<std::vector<at::Tensor>>())
      .def("start", &WatchedWeights::start)
      .def("stop", &WatchedWeights::stop);
}

}  // namespace fastamp::python
