// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "python_call_site.h"
#include "trace/events.h"
#include "trace/recorder.h"
#include "trace/trace_text.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace py = pybind11;

namespace fastamp::python {
namespace {

using autocast::Recorder;
using SharedRecorder = std::shared_ptr<Recorder>;

py::dict to_dict(const CastCounts& casts) {
  py::dict out;
  out["weight_casts"] = casts.weight_casts;
  out["other_casts"] = casts.other_casts;
  out["cast_bytes"] = casts.cast_bytes;
  out["cache_hits"] = casts.cache_hits;
  out["activation_hits"] = casts.activation_hits;
  out["kept_hits"] = casts.kept_hits;
  return out;
}

py::dict to_dict(const TraceRow& row) {
  py::dict out = to_dict(row.casts);
  out["op"] = row.op;
  out["device"] = c10::DeviceTypeName(row.device, /*lower_case=*/true);
  out["policy"] = std::string(to_string(row.policy));
  py::tuple inputs(row.inputs.size());
  for (std::size_t i = 0; i < row.inputs.size(); ++i) {
    inputs[i] = autocast::dtype_name(row.inputs[i]);
  }
  out["inputs"] = std::move(inputs);
  out["run_dtype"] = autocast::dtype_name(row.run_dtype);
  out["float8"] = row.float8;
  out["source"] = row.source;
  out["module"] = row.module;
  out["calls"] = row.calls;
  return out;
}

py::list rows(const Recorder& recorder) {
  py::list out;
  for (const auto& row : recorder.rows()) {
    out.append(to_dict(row));
  }
  return out;
}

std::pair<std::uint64_t, std::uint64_t> gradient_casts(const Recorder& recorder) {
  const auto casts = recorder.gradient_casts();
  return {casts.casts, casts.bytes};
}

/// @param shorten  What is shown of a source.
std::string table(const Recorder& recorder, const std::string& sort_by, std::size_t row_limit,
                  const py::function& shorten) {
  const auto order = autocast::trace_order_of("table: expected sort_by", sort_by);
  auto rows = recorder.rows();
  for (auto& row : rows) {
    row.source = shorten(row.source).cast<std::string>();
  }
  return autocast::format_table(std::move(rows), recorder.gradient_casts(), order, row_limit);
}

std::string json(const Recorder& recorder) {
  return autocast::format_json(recorder.rows(), recorder.gradient_casts());
}

/// (op, device, policy, dtypes of the inputs) of the call in progress; None without an open trace.
py::object current_op_call() {
  const auto* const call = autocast::TracedCall::current();
  if (call == nullptr) {
    return py::none();
  }
  py::tuple inputs(call->inputs().size());
  for (std::size_t i = 0; i < call->inputs().size(); ++i) {
    inputs[i] = autocast::dtype_name(call->inputs()[i]);
  }
  const auto& op = call->op();
  return py::make_tuple(op.name, c10::DeviceTypeName(op.device, /*lower_case=*/true),
                        std::string(to_string(op.policy)), std::move(inputs));
}

std::optional<std::int64_t> numel_of_subclass(const at::Tensor& tensor) {
  try {
    return tensor.sym_numel().maybe_as_int();
  } catch (const std::exception&) {
    const py::gil_scoped_acquire gil;
    PyErr_Clear();
    return std::nullopt;
  }
}

}  // namespace

void bind_trace(py::module_& module) {
  py::class_<Recorder, SharedRecorder>(module, "Recorder")
      .def(py::init<bool>(), py::arg("source"))
      .def("start", [](const SharedRecorder& self) { return autocast::start_recording(self); })
      .def("stop", [](const SharedRecorder& self) { return autocast::stop_recording(self); })
      .def("rows", rows)
      .def("gradient_casts", gradient_casts)
      .def("table", torch::wrap_pybind_function(table))
      .def("json", json);
  module.def("current_op_call", current_op_call);
  module.def("skip_source_folders", skip_source_folders);
  autocast::set_call_site_finder(python_call_site);
  autocast::set_numel_reader(numel_of_subclass);
}

}  // namespace fastamp::python
