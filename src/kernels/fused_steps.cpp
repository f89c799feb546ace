// SPDX-License-Identifier: Apache-2.0
#include "kernels/fused_steps.h"

#include "core/tensor_lists.h"
#include "kernels/amp_args.h"

#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

namespace fastamp::kernels {
namespace {

constexpr std::array<Slot, 6> kElementSlots = {kGrad, kWeight, kHalf, kFirst, kSecond, kMax};

/// Whether element i of a tensor's memory belongs to the i-th element of the weight's memory.
bool lies_like(const at::Tensor& t, const at::Tensor& weight) {
  return (weight.is_contiguous() && t.is_contiguous()) ||
         (t.is_non_overlapping_and_dense() && t.strides() == weight.strides());
}

/// The values of a tensor in memory that lies as the weight's, which is dense.
at::Tensor copy_like(const at::Tensor& t, const at::Tensor& weight) {
  const auto options = at::TensorOptions().dtype(t.scalar_type()).device(t.device());
  return at::empty_strided(weight.sizes(), weight.strides(), options).copy_(t);
}

unsigned storage_bits(const at::Tensor* t) {
  if (t == nullptr || t->scalar_type() == at::kFloat) {
    return static_cast<unsigned>(Storage::kFloat);
  }
  if (t->scalar_type() == at::kFloat8_e4m3fn || t->scalar_type() == at::kByte) {
    return static_cast<unsigned>(Storage::kFloat8);
  }
  return static_cast<unsigned>(t->scalar_type() == at::kHalf ? Storage::kHalf : Storage::kBFloat16);
}

bool has_codes(const StepEntry& entry) {
  return entry.tensors[kFirst] != nullptr && entry.tensors[kFirst]->scalar_type() == at::kByte;
}

/// The group of 2^n codes as a tag has it: n - 5. A group of an empty entry has any size.
unsigned group_shift_bits(const StepEntry& entry) {
  if (!has_codes(entry) || entry.tensors[kScales]->numel() == 0) {
    return 0U;
  }
  const auto codes = static_cast<std::uint64_t>(entry.tensors[kFirst]->numel());
  const auto groups = static_cast<std::uint64_t>(entry.tensors[kScales]->numel()) / 2;
  return static_cast<unsigned>(std::countr_zero(codes / groups) - 5) << StepTag::kGroupShiftBit;
}

StepTag tag_of(const StepEntry& entry) {
  const unsigned bits = storage_bits(entry.tensors[kGrad]) << (2 * kGradBits) |
                        storage_bits(entry.tensors[kHalf]) << (2 * kHalfBits) |
                        storage_bits(entry.tensors[kFirst]) << (2 * kMomentBits);
  const unsigned weight_copy = entry.half_is_copy ? StepTag::kCopyBit : 0U;
  const at::Tensor* first = entry.tensors[kFirst];
  const bool noisy =
      entry.noise_origin >= 0 && first != nullptr && first->scalar_type() == at::kBFloat16;
  const bool remainder = entry.tensors[kWeight]->scalar_type() == at::kShort;
  return {static_cast<std::uint16_t>(
      bits << StepTag::kGroupBits | weight_copy | (noisy ? StepTag::kNoisyBit : 0U) |
      (remainder ? StepTag::kRemainderBit : 0U) | group_shift_bits(entry))};
}

void* pointer(const at::Tensor& t, Slot slot, bool write_grads) {
  // A gradient that is only read must not materialise a copy-on-write tensor.
  return slot == kGrad && !write_grads ? const_cast<void*>(t.const_data_ptr())
                                       : t.mutable_data_ptr();
}

/// Finds where the operands of an entry lie. False if one of them needs more than that.
/// @param by_rows  Elements have to lie row by row.
bool find_addresses(const StepEntry& entry, bool by_rows, DenseEntry& dense) {
  const at::Tensor& weight = *entry.tensors[kWeight];
  const bool empty = dense.numel == 0;
  bool found = empty || (by_rows ? weight.is_contiguous() : weight.is_non_overlapping_and_dense());
  for (std::size_t slot = 0; slot < kSlots; ++slot) {
    const at::Tensor* t = entry.tensors.at(slot);
    if (t == nullptr || (empty && slot != kStep)) {
      continue;
    }
    void* const address = address_of(*t->unsafeGetTensorImpl());
    dense.pointers.at(slot) = address;
    found = found && address != nullptr &&
            (slot == kStep || (by_rows ? t->is_contiguous() : lies_like(*t, weight)));
  }
  return found;
}

/// Completes an entry for which find_addresses() was not enough.
void complete(const StepEntry& entry, bool by_rows, bool write_grads, DenseEntry& dense,
              DenseStep& step) {
  const at::Tensor* count = entry.tensors[kStep];
  dense.pointers[kStep] = count == nullptr ? nullptr : count->mutable_data_ptr<float>();
  if (dense.numel == 0) {
    return;
  }
  const at::Tensor& weight = *entry.tensors[kWeight];
  // Else it is copied itself, row by row.
  const bool whole = !by_rows && weight.is_non_overlapping_and_dense();
  for (const auto slot : kElementSlots) {
    const at::Tensor* t = entry.tensors.at(slot);
    if (t == nullptr) {
      continue;
    }
    if (whole ? lies_like(*t, weight) : t->is_contiguous()) {
      dense.pointers.at(slot) = pointer(*t, slot, write_grads);
      continue;
    }
    step.copied.emplace_back(slot == kGrad && !write_grads ? at::Tensor() : *t,
                             whole ? copy_like(*t, weight) : t->contiguous());
    dense.pointers.at(slot) = step.copied.back().second.mutable_data_ptr();
  }
}

/// The order of a tensor whose dimensions lie in memory as [0, row), [column, end), [row, column).
std::optional<ElementOrder> order_turned_at(const at::Tensor& tensor, std::int64_t row,
                                            std::int64_t column) {
  std::int64_t stride = 1;
  std::array<std::int64_t, 3> sizes = {1, 1, 1};  // of the parts
  const auto lies = [&](std::size_t part, std::int64_t from, std::int64_t to) {
    for (std::int64_t dim = to - 1; dim >= from; --dim) {
      if (tensor.size(dim) != 1 && tensor.stride(dim) != stride) {
        return false;
      }
      stride *= tensor.size(dim);
      sizes.at(part) *= tensor.size(dim);
    }
    return true;
  };
  constexpr auto kMost = static_cast<std::int64_t>(std::numeric_limits<std::uint32_t>::max());
  if (!lies(1, row, column) || !lies(2, column, tensor.dim()) || !lies(0, 0, row) ||
      std::max(sizes[1], sizes[2]) > kMost) {
    return std::nullopt;
  }
  return ElementOrder{static_cast<std::uint32_t>(sizes[1]), static_cast<std::uint32_t>(sizes[2])};
}

/// Lists and options that both steps are given.
template <typename Args>
StepArgs shared_args(const char* fn, const Args& args) {
  return {.fn = fn,
          .params = args.params,
          .grads = args.grads,
          .masters = args.masters,
          .group_sizes = args.group_sizes,
          .lr = args.lr,
          .lr_tensors = args.lr_tensors,
          .inv_scale = args.inv_scale,
          .clip_coef = args.clip_coef,
          .found_inf = args.found_inf,
          .clip_value = args.clip_value,
          .write_grads = args.write_grads,
          .weight_copies = args.weight_copies,
          .copy_of = args.copy_of,
          .noise_origins = args.noise_origins};
}

}  // namespace

StepArgs step_args(const ops::FusedSgdArgs& args) { return shared_args("fused_sgd_", args); }

StepArgs step_args(const ops::FusedAdamwArgs& args) {
  auto all = shared_args("fused_adamw_", args);
  all.moment_scales = args.moment_scales;
  return all;
}

std::optional<ElementOrder> element_order(const at::Tensor& tensor) {
  if (tensor.is_contiguous() || !tensor.is_non_overlapping_and_dense()) {
    return ElementOrder{};  // What is not dense is copied, row by row.
  }
  for (std::int64_t row = 0; row < tensor.dim(); ++row) {
    for (std::int64_t column = row + 1; column < tensor.dim(); ++column) {
      if (const auto order = order_turned_at(tensor, row, column)) {
        return order;
      }
    }
  }
  return std::nullopt;
}

StepEntries::StepEntries(const std::vector<StepEntry>& entries) {
  reserve(entries.size());
  for (const auto& entry : entries) {
    add(entry);
  }
}

void StepEntries::add(const StepEntry& entry) {
  const at::Tensor& weight = *entry.tensors[kWeight];
  // A meta tensor's sizes may be symbols, and nobody asks for its entries.
  if (weight.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) [[unlikely]] {
    return;
  }
  DenseEntry dense;
  dense.numel = weight.numel();
  if (dense.numel == 0) {
    if (entry.tensors[kStep] == nullptr) {
      return;
    }
    any_empty_ = true;
  }
  dense.group = entry.group;
  dense.tag = tag_of(entry);
  // Groups of codes are those of the weight's elements row by row.
  bool by_rows = dense.tag.has_codes();
  if (dense.tag.is_noisy() || by_rows) {
    dense.noise_origin = static_cast<std::uint64_t>(entry.noise_origin);
  }
  if (dense.tag.is_noisy()) {
    const auto order = element_order(weight);
    by_rows = !order;
    dense.order = order.value_or(ElementOrder{});
    if (dense.order.turns()) {
      dense.tag.bits = static_cast<std::uint16_t>(dense.tag.bits | StepTag::kTurnedBit);
    }
  }
  kinds_.at(static_cast<std::size_t>(dense.tag.kind())) = true;
  if (!find_addresses(entry, by_rows, dense)) [[unlikely]] {
    others_.push_back({entries_.size(), entry, by_rows});
  }
  entries_.push_back(dense);
}

DenseStep StepEntries::make_dense(bool write_grads) && {
  DenseStep step;
  for (const auto& [index, entry, by_rows] : others_) {
    complete(entry, by_rows, write_grads, entries_[index], step);
  }
  step.entries = std::move(entries_);
  step.kinds = kinds_;
  if (any_empty_) {
    std::ranges::stable_partition(step.entries,
                                  [](const DenseEntry& entry) { return entry.numel > 0; });
  }
  return step;
}

void DenseStep::copy_back() const {
  for (const auto& [original, copy] : copied) {
    if (original.defined()) {
      original.copy_(copy);
    }
  }
}

LearningRate learning_rate(const StepArgs& args, std::size_t group) {
  LearningRate rate{args.lr[group], nullptr, nullptr};
  if (args.lr_tensors.empty()) {
    return rate;
  }
  const at::Tensor& t = args.lr_tensors[group];
  const bool precise = t.scalar_type() == at::kDouble;
  if (t.is_cpu()) {
    rate.number =
        precise ? *t.const_data_ptr<double>() : static_cast<double>(*t.const_data_ptr<float>());
  } else if (precise) {
    rate.precise = t.const_data_ptr<double>();
  } else {
    rate.single = t.const_data_ptr<float>();
  }
  return rate;
}

AmpStepPointers amp_step_pointers(const StepArgs& args) {
  const auto pointer = [](const std::optional<at::Tensor>& t) {
    const auto* const tensor = find_tensor(t);
    return tensor == nullptr ? nullptr : tensor->const_data_ptr<float>();
  };
  constexpr double kNoClamp = std::numeric_limits<double>::infinity();
  return {pointer(args.inv_scale), pointer(args.clip_coef), pointer(args.found_inf),
          static_cast<float>(args.clip_value.value_or(kNoClamp)), args.write_grads};
}

std::vector<SgdConstants> sgd_constants(const ops::FusedSgdArgs& args) {
  const auto common = step_args(args);
  std::vector<SgdConstants> groups;
  groups.reserve(args.group_sizes.size());
  for (std::size_t g = 0; g < args.group_sizes.size(); ++g) {
    groups.push_back({learning_rate(common, g), args.momentum[g], args.dampening[g],
                      args.weight_decay[g], args.nesterov.get(g), args.maximize.get(g)});
  }
  return groups;
}

std::vector<AdamConstants> adam_constants(const ops::FusedAdamwArgs& args) {
  const auto common = step_args(args);
  std::vector<AdamConstants> groups;
  groups.reserve(args.group_sizes.size());
  for (std::size_t g = 0; g < args.group_sizes.size(); ++g) {
    groups.push_back({learning_rate(common, g), args.beta1[g], args.beta2[g], args.eps[g],
                      args.weight_decay[g], args.decoupled.get(g), args.amsgrad.get(g),
                      args.maximize.get(g)});
  }
  return groups;
}

}  // namespace fastamp::kernels
