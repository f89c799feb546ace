// SPDX-License-Identifier: Apache-2.0
#include "autocast/cast_together.h"
#include "autocast/kept_casts.h"
#include "bindings.h"

#include <fastamp/autocast/kept_casts.h>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace fastamp::python {
namespace {

using autocast::KeptCastStore;

std::pair<std::size_t, std::uint64_t> kept() {
  const auto now = kept_casts();
  return {now.copies, now.bytes};
}

}  // namespace

void bind_kept_casts(py::module_& module) {
  module.def("acquire_kept_casts", [](const std::vector<at::Tensor>& weights) {
    return KeptCastStore::instance().acquire(weights);
  });
  module.def("release_kept_casts", [](std::uint64_t id) { KeptCastStore::instance().release(id); });
  module.def("drop_kept_casts",
             [](const std::vector<at::Tensor>& weights) { drop_kept_casts(weights); });
  module.def("drop_all_kept_casts", [] { drop_kept_casts(); });
  module.def("kept_casts", kept);
  module.def("acquire_cast_together", autocast::acquire_cast_together);
  module.def("release_cast_together", autocast::release_cast_together);
}

}  // namespace fastamp::python
