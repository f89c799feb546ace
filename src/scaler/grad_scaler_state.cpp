// SPDX-License-Identifier: Apache-2.0
// What a scaler remembers between iterations: as a struct, in archives of torch::save, and as the
// state_dict of Python's scalers.

#include "scaler/grad_scaler_impl.h"
#include "scaler/past_archive.h"
#include "scaler/scale_checks.h"

#include <fastamp/scaler/grad_scaler.h>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/TensorAccessor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fastamp {

std::optional<GradScalerState> GradScaler::state() const {
  expect_not_moved_from("state");
  if (!impl_->enabled) {
    return std::nullopt;
  }
  const auto& state = impl_->state;
  GradScalerState result;
  result.scale = state.scale();
  result.growth_factor = state.rules().growth_factor;
  result.backoff_factor = state.rules().backoff_factor;
  result.growth_interval = state.rules().growth_interval;
  result.growth_tracker = state.growth_tracker();
  result.min_scale = state.rules().min_scale;
  result.max_scale = state.rules().max_scale;
  if (state.rules().hysteresis > 1) {
    result.hysteresis = state.rules().hysteresis;
    result.hysteresis_tracker = state.hysteresis_tracker();
  }
  if (state.rules().fast_growth_interval > 0) {
    result.fast_growth_interval = state.rules().fast_growth_interval;
    result.fast_growth_limit = state.fast_growth_limit();
  }
  impl_->poll(/*wait=*/true);
  result.history = impl_->core.scale_history().history();
  result.overflow_report = impl_->report({});
  result.skipped_in_a_row = impl_->core.log().skipped_in_a_row();
  return result;
}

void GradScaler::load_state(const std::optional<GradScalerState>& state) {
  expect_not_moved_from("load_state");
  if (!impl_->enabled) {
    return;
  }
  TORCH_CHECK(
      state.has_value(),
      "load_state: expected the state of an enabled scaler, got an empty one, as a disabled "
      "scaler returns it.");
  auto rules = impl_->state.rules();
  rules.growth_factor = state->growth_factor;
  rules.backoff_factor = state->backoff_factor;
  rules.growth_interval = state->growth_interval;
  rules.min_scale = state->min_scale ? state->min_scale : rules.min_scale;
  rules.max_scale = state->max_scale ? state->max_scale : rules.max_scale;
  rules.hysteresis = state->hysteresis.value_or(rules.hysteresis);
  rules.fast_growth_interval = state->fast_growth_interval.value_or(rules.fast_growth_interval);
  scaler::check_rules("load_state", rules);
  scaler::check_extras("load_state", rules, std::nullopt);
  scaler::check_counts("load_state", *state);
  scaler::check_notes("load_state", *state);
  // What needs memory comes first: what is loaded in the end is all of it or nothing.
  const auto tensors = impl_->state.tensors_for(rules);
  auto report = state->overflow_report;
  impl_->core.load(state->scale, state->history, state->skipped_in_a_row);
  impl_->state.load(rules, tensors, state->scale, state->growth_tracker,
                    state->hysteresis_tracker.value_or(rules.hysteresis),
                    state->fast_growth_limit.value_or(std::numeric_limits<double>::infinity()));
  impl_->loaded_report = std::move(report);
}

namespace {

// Entries carry torch's state_dict keys, so a reader of the archive meets familiar names.
constexpr const char* kEnabled = "enabled";
constexpr const char* kLoad = "GradScaler::load";

template <typename T>
void write_if(torch::serialize::OutputArchive& archive, const std::string& key,
              const std::optional<T>& value) {
  if (value) {
    archive.write(key, c10::IValue(*value));
  }
}

std::optional<double> read_double_if(torch::serialize::InputArchive& archive,
                                     const std::string& key) {
  c10::IValue value;
  return archive.try_read(key, value) ? std::optional<double>(value.toDouble()) : std::nullopt;
}

std::optional<int64_t> read_int_if(torch::serialize::InputArchive& archive,
                                   const std::string& key) {
  c10::IValue value;
  return archive.try_read(key, value) ? std::optional<int64_t>(value.toInt()) : std::nullopt;
}

}  // namespace

void GradScaler::save(torch::serialize::OutputArchive& archive) const {
  expect_not_moved_from("save");
  const auto current = state();
  archive.write(kEnabled, c10::IValue(current.has_value()));
  if (!current) {
    return;
  }
  archive.write("scale", c10::IValue(current->scale));
  archive.write("growth_factor", c10::IValue(current->growth_factor));
  archive.write("backoff_factor", c10::IValue(current->backoff_factor));
  archive.write("growth_interval", c10::IValue(current->growth_interval));
  archive.write("_growth_tracker", c10::IValue(current->growth_tracker));
  write_if(archive, "min_scale", current->min_scale);
  write_if(archive, "max_scale", current->max_scale);
  write_if(archive, "hysteresis", current->hysteresis);
  write_if(archive, "_hysteresis_tracker", current->hysteresis_tracker);
  write_if(archive, "fast_growth_interval", current->fast_growth_interval);
  write_if(archive, "_fast_growth_limit", current->fast_growth_limit);
  archive.write("history", scaler::history_tensor(current->history), /*is_buffer=*/true);
  scaler::write_report(archive, current->overflow_report);
  archive.write("skipped_in_a_row", c10::IValue(current->skipped_in_a_row));
}

void GradScaler::load(torch::serialize::InputArchive& archive) {
  expect_not_moved_from("load");
  if (!is_enabled()) {
    return;
  }
  if (!scaler::read_entry(kLoad, archive, kEnabled).toBool()) {
    load_state(std::nullopt);
    return;
  }
  GradScalerState stored;
  stored.scale = scaler::read_entry(kLoad, archive, "scale").toDouble();
  stored.growth_factor = scaler::read_entry(kLoad, archive, "growth_factor").toDouble();
  stored.backoff_factor = scaler::read_entry(kLoad, archive, "backoff_factor").toDouble();
  stored.growth_interval = scaler::read_entry(kLoad, archive, "growth_interval").toInt();
  stored.growth_tracker = scaler::read_entry(kLoad, archive, "_growth_tracker").toInt();
  stored.min_scale = read_double_if(archive, "min_scale");
  stored.max_scale = read_double_if(archive, "max_scale");
  stored.hysteresis = read_int_if(archive, "hysteresis");
  stored.hysteresis_tracker = read_int_if(archive, "_hysteresis_tracker");
  stored.fast_growth_interval = read_int_if(archive, "fast_growth_interval");
  stored.fast_growth_limit = read_double_if(archive, "_fast_growth_limit");
  at::Tensor history;
  if (archive.try_read("history", history, /*is_buffer=*/true)) {
    stored.history = scaler::history_in_archive(kLoad, history);
  }
  stored.overflow_report = scaler::read_report(kLoad, archive);
  stored.skipped_in_a_row = read_int_if(archive, "skipped_in_a_row").value_or(0);
  load_state(stored);
}

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const GradScaler& scaler) {
  scaler.save(archive);
  return archive;
}

torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                           GradScaler& scaler) {
  scaler.load(archive);
  return archive;
}

namespace {

using Dict = c10::impl::GenericDict;

constexpr const char* kFunction = "GradScalerState::from_python";
constexpr std::size_t kHistoryFields = 5;  // step, scale, skipped, norm, growth_tracker

template <typename... Got>
[[noreturn]] void refuse(const std::string& entry, const char* expected, const Got&... got) {
  TORCH_CHECK_VALUE(false, kFunction, ": expected ", entry, " to be ", expected, ", got ", got...);
}

Dict dict_of(const c10::IValue& value, const std::string& entry) {
  if (!value.isGenericDict()) {
    refuse(entry, "a dict", value.tagKind());
  }
  return value.toGenericDict();
}

std::optional<c10::IValue> find(const Dict& dict, const char* key) {
  const auto found = dict.find(c10::IValue(key));
  return found == dict.end() ? std::nullopt : std::optional<c10::IValue>(found->value());
}

std::string named(const char* key) { return "the entry \"" + std::string(key) + '"'; }

c10::IValue get(const Dict& dict, const char* key) {
  auto found = find(dict, key);
  TORCH_CHECK_VALUE(found.has_value(), kFunction, ": expected a dict with ", named(key),
                    ", got one without it");
  return *std::move(found);
}

/// Python takes anything that is like a number, a tensor of one element too.
double number_of(const c10::IValue& value, const std::string& entry) {
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().numel() == 1 &&
      !value.toTensor().is_complex()) {
    return value.toTensor().item<double>();
  }
  if (!value.isDouble() && !value.isInt()) {
    refuse(entry, "a number", value.tagKind());
  }
  return value.isInt() ? static_cast<double>(value.toInt()) : value.toDouble();
}

int64_t integer_of(const c10::IValue& value, const std::string& entry) {
  if (value.isInt()) {
    return value.toInt();
  }
  constexpr double kLimit = 9007199254740992.0;  // 2^53
  const double number = number_of(value, entry);
  const bool is_exact = number >= -kLimit && number <= kLimit;  // false for NaN
  if (!is_exact || number != static_cast<double>(static_cast<int64_t>(number))) {
    refuse(entry, "an integer", number);
  }
  return static_cast<int64_t>(number);
}

double number(const Dict& dict, const char* key) { return number_of(get(dict, key), named(key)); }
int64_t integer(const Dict& dict, const char* key) {
  return integer_of(get(dict, key), named(key));
}

std::optional<double> number_if(const Dict& dict, const char* key) {
  const auto value = find(dict, key);
  return value ? std::optional<double>(number_of(*value, named(key))) : std::nullopt;
}

std::optional<int64_t> integer_if(const Dict& dict, const char* key) {
  const auto value = find(dict, key);
  return value ? std::optional<int64_t>(integer_of(*value, named(key))) : std::nullopt;
}

/// The items of a list or tuple.
std::vector<c10::IValue> items_of(const c10::IValue& value, const std::string& entry) {
  if (value.isTuple()) {
    return value.toTupleRef().elements().vec();
  }
  if (!value.isList()) {
    refuse(entry, "a list", value.tagKind());
  }
  return value.toListRef().vec();
}

std::vector<StepRecord> history_of(const c10::IValue& value) {
  const std::string entry = "records of the entry \"history\"";
  std::vector<StepRecord> history;
  for (const auto& record : items_of(value, "the entry \"history\"")) {
    const auto fields = items_of(record, entry);
    if (fields.size() != kHistoryFields) {
      refuse(entry, "tuples of 5", fields.size());
    }
    const bool skipped =
        fields[2].isBool() ? fields[2].toBool() : number_of(fields[2], entry) != 0.0;
    history.push_back({.step = integer_of(fields[0], entry),
                       .scale = number_of(fields[1], entry),
                       .skipped = skipped,
                       .norm = number_of(fields[3], entry),
                       .growth_tracker = integer_of(fields[4], entry)});
  }
  return history;
}

NonFiniteGradient gradient_of(const c10::IValue& value) {
  const auto entry = dict_of(value, "gradients of the entry \"overflow_report\"");
  const auto name = get(entry, "name");
  if (!name.isString()) {
    refuse(named("name"), "a string", name.tagKind());
  }
  const auto index = integer(entry, "index");
  if (index < 0) {
    refuse(named("index"), "0 or more", index);
  }
  NonFiniteGradient gradient{.name = name.toStringRef(),
                             .index = static_cast<std::size_t>(index),
                             .shape = {},
                             .inf = integer(entry, "inf"),
                             .nan = integer(entry, "nan")};
  if (const auto shape = get(entry, "shape"); !shape.isNone()) {
    for (const auto& size : items_of(shape, named("shape"))) {
      gradient.shape.push_back(integer_of(size, named("shape")));
    }
  }
  return gradient;
}

OverflowReport report_of(const c10::IValue& value) {
  OverflowReport report;
  if (value.isNone()) {
    return report;
  }
  const auto entries = dict_of(value, named("overflow_report"));
  report.step = integer(entries, "step");
  report.scale = number(entries, "scale");
  for (const auto& gradient : items_of(get(entries, "gradients"), named("gradients"))) {
    report.gradients.push_back(gradient_of(gradient));
  }
  return report;
}

Dict new_dict() { return Dict(c10::StringType::get(), c10::AnyType::get()); }

void put(Dict& dict, const char* key, c10::IValue value) {
  dict.insert(c10::IValue(key), std::move(value));
}

template <typename T>
void put_if(Dict& dict, const char* key, const std::optional<T>& value) {
  if (value) {
    put(dict, key, c10::IValue(*value));
  }
}

c10::IValue python_history(const std::vector<StepRecord>& history) {
  c10::impl::GenericList records(c10::AnyType::get());
  for (const auto& record : history) {
    records.push_back(c10::ivalue::Tuple::create(
        {c10::IValue(record.step), c10::IValue(record.scale), c10::IValue(record.skipped),
         c10::IValue(record.norm), c10::IValue(record.growth_tracker)}));
  }
  return records;
}

c10::IValue python_report(const OverflowReport& report) {
  if (!report) {
    return {};
  }
  c10::impl::GenericList gradients(c10::AnyType::get());
  for (const auto& gradient : report.gradients) {
    auto entry = new_dict();
    put(entry, "name", gradient.name);
    put(entry, "index", static_cast<int64_t>(gradient.index));
    put(entry, "shape",
        c10::ivalue::Tuple::create(
            std::vector<c10::IValue>(gradient.shape.begin(), gradient.shape.end())));
    put(entry, "inf", gradient.inf);
    put(entry, "nan", gradient.nan);
    gradients.push_back(c10::IValue(entry));
  }
  auto entries = new_dict();
  put(entries, "step", report.step);
  put(entries, "scale", report.scale);
  put(entries, "gradients", gradients);
  return entries;
}

}  // namespace

std::optional<GradScalerState> GradScalerState::from_python(const c10::IValue& state_dict) {
  const auto dict = dict_of(state_dict, "the state_dict of a scaler");
  if (dict.empty()) {
    return std::nullopt;
  }
  GradScalerState state;
  state.scale = number(dict, "scale");
  state.growth_factor = number(dict, "growth_factor");
  state.backoff_factor = number(dict, "backoff_factor");
  state.growth_interval = integer(dict, "growth_interval");
  state.growth_tracker = integer(dict, "_growth_tracker");
  state.min_scale = number_if(dict, "min_scale");
  state.max_scale = number_if(dict, "max_scale");
  state.hysteresis = integer_if(dict, "hysteresis");
  state.hysteresis_tracker = integer_if(dict, "_hysteresis_tracker");
  state.fast_growth_interval = integer_if(dict, "fast_growth_interval");
  state.fast_growth_limit = number_if(dict, "_fast_growth_limit");
  if (const auto history = find(dict, "history")) {
    state.history = history_of(*history);
  }
  if (const auto report = find(dict, "overflow_report")) {
    state.overflow_report = report_of(*report);
  }
  state.skipped_in_a_row = integer_if(dict, "skipped_in_a_row").value_or(0);
  return state;
}

c10::IValue GradScalerState::to_python() const {
  auto dict = new_dict();
  put(dict, "scale", scale);
  put(dict, "growth_factor", growth_factor);
  put(dict, "backoff_factor", backoff_factor);
  put(dict, "growth_interval", growth_interval);
  put(dict, "_growth_tracker", growth_tracker);
  put_if(dict, "min_scale", min_scale);
  put_if(dict, "max_scale", max_scale);
  put_if(dict, "hysteresis", hysteresis);
  put_if(dict, "_hysteresis_tracker", hysteresis_tracker);
  put_if(dict, "fast_growth_interval", fast_growth_interval);
  put_if(dict, "_fast_growth_limit", fast_growth_limit);
  put(dict, "history", python_history(history));
  put(dict, "overflow_report", python_report(overflow_report));
  put(dict, "skipped_in_a_row", skipped_in_a_row);
  return dict;
}

}  // namespace fastamp
