// SPDX-License-Identifier: Apache-2.0
#include "ops/checks.h"

#include "core/dtypes.h"
#include "core/tensor_lists.h"
#include "kernels/functors/float8_copy.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <string>
#include <utility>

namespace fastamp::ops {
namespace {

using namespace kernels;  // NOLINT(google-build-using-namespace): slots and entries of a step

/// The slow half of the gradient check: names what is wrong with grads[index], if anything is.
void check_gradient(const char* fn, const at::Tensor& t, std::size_t index, c10::Device device,
                    bool written) {
  TORCH_CHECK_VALUE(t.defined(), fn, ": expected grads[", index,
                    "] to be a tensor, got an undefined one");
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, fn, ": expected grads[", index,
                    "] to be strided, got layout ", t.layout());
  const auto dtype = t.scalar_type();
  TORCH_CHECK_TYPE(is_gradient_dtype(dtype) && (written || dtype != at::kDouble), fn,
                   ": expected grads[", index, "] to be ",
                   written ? "Half, BFloat16, Float or Double" : "Half, BFloat16 or Float",
                   ", got ", dtype);
  TORCH_CHECK_VALUE(t.device() == device, fn, ": expected grads[", index, "] on ", device,
                    ", the device of inv_scale, got ", t.device());
  TORCH_CHECK_VALUE(!written || at::has_internal_overlap(t) != at::MemOverlap::Yes, fn,
                    ": expected grads[", index,
                    "] to have one memory location per element, got an expanded tensor of shape ",
                    t.sizes(), " and strides ", t.strides());
}

bool has_dtype(const at::Tensor& t, Slot slot) {
  const auto dtype = t.scalar_type();
  switch (slot) {
    case kGrad:
      return dtype == at::kFloat || is_16_bit(t);
    case kHalf:  // A parameter is asked before. A copy:
      return is_16_bit(t) || dtype == at::kFloat8_e4m3fn;
    case kWeight:
      return dtype == at::kFloat || dtype == at::kShort;
    case kFirst:
    case kSecond:
    case kMax:
      return dtype == at::kFloat || dtype == at::kBFloat16;
    default:
      return dtype == at::kFloat;
  }
}

const char* dtype_names(Slot slot) {
  switch (slot) {
    case kGrad:
      return "Float, Half or BFloat16";
    case kHalf:
      return "Half, BFloat16 or Float8_e4m3fn";
    case kWeight:
      return "Float or Short";
    case kFirst:
    case kSecond:
    case kMax:
      return "Float or BFloat16";
    default:
      return "Float";
  }
}

void check_param(const StepArgs& args, std::size_t index) {
  const at::Tensor& t = args.params[index];
  TORCH_CHECK_VALUE(t.defined(), args.fn, ": expected params[", index,
                    "] to be a tensor, got an undefined one");
  TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat || is_16_bit(t), args.fn, ": expected params[",
                   index, "] to be Float, Half or BFloat16, got ", t.scalar_type());
  TORCH_CHECK_VALUE(t.device() == args.params[0].device(), args.fn, ": expected params[", index,
                    "] on ", args.params[0].device(), ", the device of params[0], got ",
                    t.device());
  check_operand(args.fn, "params", index, t, t, is_16_bit(t) ? kHalf : kWeight);
}

void check_scalar(const StepArgs& args, const char* name, const std::optional<at::Tensor>& t) {
  if (t && t->defined()) {
    check_single(args.fn, name, *t, at::kFloat, args.params[0].device(), "params");
  }
}

/// Asks for the cache lines of what belongs to the entries after the i-th of a list.
void prefetch_after(at::TensorList list, std::size_t i) {
  constexpr std::size_t kTensorAhead = 8;
  constexpr std::size_t kStorageAhead = 4;
  if (i + kTensorAhead < list.size()) {
    prefetch_tensor(list[i + kTensorAhead].unsafeGetTensorImpl());
    prefetch_storage(list[i + kStorageAhead].unsafeGetTensorImpl());
  }
}

/// Hands out the tensors of a list one by one.
struct Cursor {
  const char* fn;
  const char* name;
  at::TensorList list;
  bool codes = false;  ///< As check_operand() has it.
  std::size_t next = 0;

  const at::Tensor& take(const at::Tensor& param, Slot slot) {
    TORCH_CHECK_VALUE(next < list.size(), fn, ": expected more than ", list.size(), " ", name,
                      ", one for each parameter that needs one");
    prefetch_after(list, next);
    const at::Tensor& t = list[next];
    check_operand(fn, name, next, t, param, slot, codes);
    ++next;
    return t;
  }
  void finish() const {
    TORCH_CHECK_VALUE(next == list.size(), fn, ": expected ", next, " ", name,
                      ", one for each parameter that needs one, got ", list.size());
  }
};

/// Hands out the weight copies of fp32 parameters; copy_of says whose they are.
class Copies {
 public:
  explicit Copies(const StepArgs& args) : args_(args) {
    TORCH_CHECK_VALUE(args.copy_of.size() == args.weight_copies.size(), args.fn, ": expected ",
                      args.weight_copies.size(), " copy_of, one for each of weight_copies, got ",
                      args.copy_of.size());
    const auto count = static_cast<std::int64_t>(args.params.size());
    std::int64_t least = 0;
    for (const auto index : args.copy_of) {
      TORCH_CHECK_VALUE(least <= index && index < count, args.fn,
                        ": expected copy_of to be ascending indices of params, less than ", count,
                        ", got ", args.copy_of);
      least = index + 1;
    }
  }

  /// Puts the copy of params[index], if there is one, into its entry.
  void add_to(StepEntry& entry, std::size_t index) {
    if (next_ == args_.copy_of.size() || std::cmp_not_equal(args_.copy_of[next_], index)) {
      return;
    }
    const at::Tensor& param = args_.params[index];
    TORCH_CHECK_TYPE(!is_16_bit(param), args_.fn, ": expected params[", index,
                     "], which has a weight copy, to be Float, got ", param.scalar_type());
    const at::Tensor& copy = args_.weight_copies[next_];
    check_operand(args_.fn, "weight_copies", next_, copy, param, kHalf);
    if (copy.scalar_type() == at::kFloat8_e4m3fn) {
      check_float8_copy(copy, param);
    }
    entry.tensors[kHalf] = &copy;
    entry.half_is_copy = true;
    ++next_;
  }

 private:
  /// Its header is written, too, and belongs to this very memory.
  void check_float8_copy(const at::Tensor& copy, const at::Tensor& param) const {
    const auto header = static_cast<std::int64_t>(kFloat8HeaderBytes);
    const auto offset = copy.sym_storage_offset();
    TORCH_CHECK_VALUE(offset >= header && offset % header == 0, args_.fn,
                      ": expected weight_copies[", next_,
                      "], which is Float8_e4m3fn, to begin at a multiple of ", header,
                      " bytes in its storage, behind a header, got ", offset);
    TORCH_CHECK_VALUE(
        param.is_non_overlapping_and_dense() && copy.sym_strides().equals(param.sym_strides()),
        args_.fn, ": expected weight_copies[", next_,
        "], which is Float8_e4m3fn, to lie densely as its parameter, got strides ",
        copy.sym_strides(), " and ", param.sym_strides());
  }

  const StepArgs& args_;
  std::size_t next_ = 0;
};

/// Whether the scales of a parameter's codes are those of 32, 64 or 128 neighbours in a row.
bool fit_codes(const at::Tensor& scales, const at::Tensor& param) {
  if (param.dim() == 0 || scales.dim() != 3 || scales.size(0) != param.size(0) ||
      scales.size(2) != 2 || !scales.is_contiguous()) {
    return false;
  }
  const auto groups = scales.numel() / 2;
  if (groups == 0) {
    return param.numel() == 0;
  }
  const auto size = param.numel() / groups;
  return groups * size == param.numel() && (size == 32 || size == 64 || size == 128);
}

/// Checks what codes of 8 bits need besides; puts their scales into the entry.
void check_codes(const StepArgs& args, StepEntry& entry, std::size_t index, Cursor& scales) {
  TORCH_CHECK_TYPE(entry.tensors[kSecond] != nullptr && entry.tensors[kMax] == nullptr, args.fn,
                   ": expected the moments of params[", index,
                   "], which has momentum or amsgrad, to be Float or BFloat16, got Byte");
  TORCH_CHECK_VALUE(entry.noise_origin >= 0, args.fn, ": expected noise_origins[", index,
                    "] of at least 0, because the moments of params[", index, "] are Byte, got ",
                    entry.noise_origin);
  const at::Tensor& param = args.params[index];
  const at::Tensor* const copy = entry.half_is_copy ? entry.tensors[kHalf] : nullptr;
  TORCH_CHECK_VALUE(
      copy == nullptr || copy->scalar_type() != at::kFloat8_e4m3fn || param.is_contiguous(),
      args.fn, ": expected params[", index,
      "], which has Byte moments and a Float8_e4m3fn weight copy, to be contiguous");
  TORCH_CHECK_VALUE(scales.next < scales.list.size(), args.fn, ": expected more than ",
                    scales.list.size(), " moment_scales, one for each parameter with Byte moments");
  const std::size_t at = scales.next++;
  const at::Tensor& t = scales.list[at];
  TORCH_CHECK_VALUE(t.defined(), args.fn, ": expected moment_scales[", at,
                    "] to be a tensor, got an undefined one");
  TORCH_CHECK_TYPE(t.scalar_type() == at::kByte, args.fn, ": expected moment_scales[", at,
                   "] to be Byte, got ", t.scalar_type());
  TORCH_CHECK_VALUE(t.device() == param.device(), args.fn, ": expected moment_scales[", at, "] on ",
                    param.device(), ", the device of params, got ", t.device());
  TORCH_CHECK_VALUE(
      param.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || fit_codes(t, param), args.fn,
      ": expected moment_scales[", at,
      "] contiguous, of shape [rows, groups of 32, 64 or 128 in a row, 2] for a "
      "parameter of shape ",
      param.sym_sizes(), ", got shape ", t.sym_sizes());
  entry.tensors[kScales] = &t;
}

/// An fp8 copy has a header, and cannot be copied to where the noise of its elements is known.
void check_order(const StepArgs& args, const StepEntry& entry, std::size_t index) {
  const at::Tensor* const copy = entry.half_is_copy ? entry.tensors[kHalf] : nullptr;
  const at::Tensor* const first = entry.tensors[kFirst];
  const at::Tensor& param = args.params[index];
  if (entry.noise_origin < 0 || copy == nullptr || first == nullptr ||
      copy->scalar_type() != at::kFloat8_e4m3fn || first->scalar_type() != at::kBFloat16 ||
      param.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return;
  }
  TORCH_CHECK_VALUE(kernels::element_order(param), args.fn, ": expected params[", index,
                    "], which has noise and a Float8_e4m3fn weight copy, to lie row by row, with "
                    "channels last or transposed, got strides ",
                    param.strides());
}

/// The moments of a parameter have one dtype.
void check_moments(const char* fn, const StepEntry& entry, std::size_t index) {
  const at::Tensor* first = entry.tensors[kFirst];
  for (const auto slot : {kSecond, kMax}) {
    const at::Tensor* other = entry.tensors.at(slot);
    TORCH_CHECK_TYPE(other == nullptr || other->scalar_type() == first->scalar_type(), fn,
                     ": expected the moments of params[", index, "] to have one dtype, got ",
                     first->scalar_type(), " and ", other->scalar_type());
  }
}

}  // namespace

void check_operand(const char* fn, const char* list, std::size_t index, const at::Tensor& t,
                   const at::Tensor& like, kernels::Slot slot, bool codes) {
  TORCH_CHECK_VALUE(t.defined(), fn, ": expected ", list, "[", index,
                    "] to be a tensor, got an undefined one");
  TORCH_CHECK_TYPE(has_dtype(t, slot) || (codes && t.scalar_type() == at::kByte), fn, ": expected ",
                   list, "[", index, "] to be ",
                   codes ? "Float, BFloat16 or Byte" : dtype_names(slot), ", got ",
                   t.scalar_type());
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, fn, ": expected ", list, "[", index,
                    "] to be strided, got layout ", t.layout());
  TORCH_CHECK_VALUE(t.device() == like.device(), fn, ": expected ", list, "[", index, "] on ",
                    like.device(), ", the device of params, got ", t.device());
  if (slot == kStep) {
    TORCH_CHECK_VALUE(t.sym_numel() == 1, fn, ": expected ", list, "[", index,
                      "] to have one element, got ", t.sym_numel());
    return;
  }
  TORCH_CHECK_VALUE(t.sym_sizes().equals(like.sym_sizes()), fn, ": expected ", list, "[", index,
                    "] of shape ", like.sym_sizes(), ", that of its parameter, got ",
                    t.sym_sizes());
  TORCH_CHECK_VALUE(
      t.is_non_overlapping_and_dense() || at::has_internal_overlap(t) != at::MemOverlap::Yes, fn,
      ": expected ", list, "[", index,
      "] to have one memory location per element, got an expanded tensor of shape ", t.sym_sizes());
}

void check_single(const char* fn, const char* name, const at::Tensor& t, at::ScalarType dtype,
                  c10::Device device, const char* device_of) {
  TORCH_CHECK_VALUE(t.defined(), fn, ": expected ", name, " to be a tensor, got an undefined one");
  TORCH_CHECK_TYPE(t.scalar_type() == dtype, fn, ": expected ", name, " to be ",
                   c10::toString(dtype), ", got ", t.scalar_type());
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, fn, ": expected ", name,
                    " to be strided, got layout ", t.layout());
  TORCH_CHECK_VALUE(t.numel() == 1, fn, ": expected ", name, " to have one element, got ",
                    t.numel());
  TORCH_CHECK_VALUE(t.device() == device, fn, ": expected ", name, " on ", device,
                    ", the device of ", device_of, ", got ", t.device());
}

void check_optional(const char* fn, const char* name, const std::optional<at::Tensor>& t,
                    at::ScalarType dtype, c10::Device device, const char* device_of) {
  if (const auto* const tensor = find_tensor(t)) {
    check_single(fn, name, *tensor, dtype, device, device_of);
  }
}

c10::Device check_first(const char* fn, const char* name, const at::Tensor& t,
                        at::ScalarType dtype) {
  TORCH_CHECK_VALUE(t.defined(), fn, ": expected ", name, " to be a tensor, got an undefined one");
  check_single(fn, name, t, dtype, t.device(), name);
  return t.device();
}

void check_table(const char* fn, const char* name, const std::optional<at::Tensor>& table,
                 at::ScalarType dtype, c10::Device device, std::int64_t rows,
                 std::int64_t columns) {
  const auto* const t = find_tensor(table);
  if (t == nullptr) {
    return;
  }
  TORCH_CHECK_TYPE(t->scalar_type() == dtype, fn, ": expected ", name, " to be ",
                   c10::toString(dtype), ", got ", t->scalar_type());
  TORCH_CHECK_VALUE(t->device() == device, fn, ": expected ", name, " on ", device, ", got ",
                    t->device());
  const bool fits = t->layout() == at::kStrided && t->dim() == 2 && t->is_contiguous() &&
                    t->sym_size(1) == columns &&
                    (rows < 0 ? t->sym_size(0) >= 1 : t->sym_size(0) == rows);
  TORCH_CHECK_VALUE(fits, fn, ": expected ", name, " to be contiguous of shape [",
                    rows < 0 ? "at least 1" : std::to_string(rows), ", ", columns, "], got shape ",
                    t->sym_sizes());
}

void check_counts(const char* fn, const std::optional<at::Tensor>& counts, c10::Device device,
                  std::size_t grads) {
  check_table(fn, "non_finite_counts", counts, at::kLong, device, static_cast<std::int64_t>(grads),
              2);
}

void check_gradients(const char* fn, at::TensorList grads, std::size_t first, c10::Device device,
                     bool written) {
  for (std::size_t i = 0; i < grads.size(); ++i) {
    const at::Tensor& t = grads[i];
    // Nearly all gradients are dense and of a good dtype: five loads and no call for those.
    if (C10_LIKELY(t.defined() && t.device() == device && t.layout() == at::kStrided &&
                   is_gradient_dtype(t.scalar_type()) &&
                   (written ? t.is_non_overlapping_and_dense() : t.scalar_type() != at::kDouble))) {
      continue;
    }
    check_gradient(fn, t, first + i, device, written);
  }
}

void check_per_group(const char* fn, const char* name, std::size_t got, std::size_t groups) {
  TORCH_CHECK_VALUE(got == groups, fn, ": expected ", name, " to have ", groups,
                    " elements, one for each of group_sizes, got ", got);
}

void check_groups(const StepArgs& args) {
  const auto groups = args.group_sizes.size();
  TORCH_CHECK_VALUE(!args.params.empty(), args.fn, ": expected at least one parameter, got none");
  check_per_group(args.fn, "lr", args.lr.size(), groups);
  if (!args.lr_tensors.empty()) {
    check_per_group(args.fn, "lr_tensors", args.lr_tensors.size(), groups);
  }
  std::int64_t total = 0;
  for (const auto size : args.group_sizes) {
    TORCH_CHECK_VALUE(size >= 0, args.fn, ": expected group_sizes of at least 0, got ", size);
    total += size;
  }
  TORCH_CHECK_VALUE(static_cast<std::size_t>(total) == args.params.size(), args.fn,
                    ": expected group_sizes to add up to the number of params, ",
                    args.params.size(), ", got ", total);
  TORCH_CHECK_VALUE(args.grads.size() == args.params.size(), args.fn, ": expected ",
                    args.params.size(), " ", args.grads_name, ", one for each of params, got ",
                    args.grads.size());
  TORCH_CHECK_VALUE(args.noise_origins.empty() || args.noise_origins.size() == args.params.size(),
                    args.fn, ": expected no noise_origins or ", args.params.size(),
                    ", one for each of params, got ", args.noise_origins.size());
  for (const auto& t : args.lr_tensors) {
    TORCH_CHECK_VALUE(t.defined(), args.fn,
                      ": expected lr_tensors to be tensors, got an undefined one");
    const auto device = t.is_cpu() ? t.device() : args.params[0].device();
    check_single(args.fn, "lr_tensors", t,
                 t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat, device, "params");
  }
}

void check_amp_step(const StepArgs& args) {
  check_scalar(args, "inv_scale", args.inv_scale);
  check_scalar(args, "clip_coef", args.clip_coef);
  check_scalar(args, "found_inf", args.found_inf);
  TORCH_CHECK_VALUE(!args.clip_value || *args.clip_value >= 0.0, args.fn,
                    ": expected clip_value to be None or at least 0, got ", *args.clip_value);
}

StepEntries check_step(const StepArgs& args, const std::vector<StateList>& states) {
  check_groups(args);
  Copies copies(args);
  Cursor masters{args.fn, "masters", args.masters};
  Cursor scales{args.fn, "moment_scales", args.moment_scales};
  std::vector<Cursor> cursors;
  cursors.reserve(states.size());
  for (const auto& state : states) {
    cursors.push_back({args.fn, state.name, state.tensors, state.codes});
  }
  StepEntries entries;
  entries.reserve(args.params.size());
  std::size_t i = 0;
  for (std::size_t group = 0; group < args.group_sizes.size(); ++group) {
    for (std::int64_t n = 0; n < args.group_sizes[group]; ++n, ++i) {
      prefetch_after(args.params, i);
      prefetch_after(args.grads, i);
      check_param(args, i);
      const at::Tensor& param = args.params[i];
      check_operand(args.fn, args.grads_name, i, args.grads[i], param, kGrad);
      StepEntry entry;
      entry.group = group;
      entry.tensors[kGrad] = &args.grads[i];
      entry.tensors[kHalf] = is_16_bit(param) ? &param : nullptr;
      entry.tensors[kWeight] = is_16_bit(param) ? &masters.take(param, kWeight) : &param;
      for (std::size_t s = 0; s < states.size(); ++s) {
        if (states[s].used[group]) {
          entry.tensors.at(states[s].slot) = &cursors[s].take(param, states[s].slot);
        }
      }
      check_moments(args.fn, entry, i);
      entry.noise_origin = args.noise_origins.empty() ? -1 : args.noise_origins[i];
      copies.add_to(entry, i);
      check_order(args, entry, i);
      if (const at::Tensor* first = entry.tensors[kFirst];
          first != nullptr && first->scalar_type() == at::kByte) {
        check_codes(args, entry, i, scales);
      }
      entries.add(entry);
    }
  }
  masters.finish();
  scales.finish();
  for (const auto& cursor : cursors) {
    cursor.finish();
  }
  check_amp_step(args);
  return entries;
}

}  // namespace fastamp::ops
