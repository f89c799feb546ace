// SPDX-License-Identifier: Apache-2.0
#include "nets/archives.h"

#include <fastamp/optim/adamw.h>
#include <fastamp/optim/muon.h>
#include <fastamp/optim/sgd.h>
#include <fastamp/scaler/grad_scaler.h>
#include <fastamp/scaler/step_guard.h>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/ones.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace fastamp::test {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

/// Draws from bytes; 0 once they are used up.
class Edits {
 public:
  explicit Edits(const Case& bytes) : bytes_(bytes) {}

  std::size_t below(std::size_t end) {
    const std::size_t drawn = at_ < bytes_.size() ? bytes_[at_++] : 0;
    return drawn % end;
  }
  /// Whether the entry that is asked for is one of those to be edited.
  bool hits() { return at_ < bytes_.size() && below(4) == 0; }

 private:
  const Case& bytes_;
  std::size_t at_ = 0;
};

c10::IValue odd_value(Edits& edits) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::vector<c10::IValue> values{
      true,
      int64_t{0},
      int64_t{-1},
      int64_t{1} << 31,
      std::numeric_limits<int64_t>::min(),
      std::numeric_limits<int64_t>::max(),
      0.0,
      -1.0,
      1e300,
      5e-324,
      std::nan(""),
      kInfinity,
      -kInfinity,
      std::string(),
      std::string("1.5.0"),
      c10::List<int64_t>({1, -2}),
      c10::List<double>({0.5, std::nan("")}),
      c10::List<std::string>({"weight"}),
      at::ones({}),
      at::ones({3}),
      at::empty({0}),
      at::full({2, 5}, std::nan(""), at::kDouble),
      at::full({2, 5}, -1e30, at::kDouble),
      at::full({8, 4}, 255, at::kByte),
      at::full({64, 64}, 255, at::kByte),
      at::full({64, 1, 2}, 255, at::kByte),
      at::ones({2, 3}, at::kLong),
      at::ones({4}, at::kComplexFloat),
      at::ones({2, 3}).to_sparse(),
  };
  return values[edits.below(values.size())];
}

/// A tensor or number that is nearly the given one.
c10::IValue near(const c10::IValue& value, Edits& edits) {
  if (value.isTensor()) {
    const auto tensor = value.toTensor();
    switch (edits.below(5)) {
      case 0:
        return tensor.flatten();
      case 1:
        return tensor.to(at::kDouble);
      case 2:
        return tensor.to(at::kBFloat16);
      case 3:
        return at::full(tensor.sizes(), tensor.is_floating_point() ? std::nan("") : 127.0,
                        tensor.options());
      default:
        return tensor.flatten().slice(0, 0, tensor.numel() / 2);
    }
  }
  if (value.isInt()) {
    return value.toInt() + (edits.below(2) == 0 ? 1 : -3);
  }
  return value.isDouble() ? c10::IValue(-value.toDouble()) : odd_value(edits);
}

/// Copies an archive, with entries left out or replaced.
void copy(InputArchive& from, OutputArchive& to, Edits& edits) {
  for (const auto& key : from.keys()) {
    const bool edit = edits.hits();
    if (edit && edits.below(4) == 0) {
      continue;
    }
    if (InputArchive inner; from.try_read(key, inner)) {
      if (edit && edits.below(2) == 0) {
        to.write(key, odd_value(edits));
        continue;
      }
      OutputArchive copied(to.compilation_unit());
      copy(inner, copied, edits);
      to.write(key, copied);
      continue;
    }
    c10::IValue value;
    if (from.try_read(key, value)) {
      to.write(key, !edit ? value : edits.below(2) == 0 ? near(value, edits) : odd_value(edits));
    }
  }
}

template <typename Saved>
std::string bytes_of(Saved& saved) {
  std::ostringstream stream;
  OutputArchive archive;
  archive << saved;
  archive.save_to(stream);
  return stream.str();
}

InputArchive archive_of(const std::string& bytes) {
  std::istringstream stream(bytes);
  InputArchive archive;
  archive.load_from(stream);
  return archive;
}

std::string edited(const std::string& bytes, Edits& edits) {
  auto from = archive_of(bytes);
  OutputArchive to;
  copy(from, to, edits);
  std::ostringstream stream;
  to.save_to(stream);
  return stream.str();
}

/// Calls load(); if it refuses, nothing may have changed.
template <typename Saved>
bool is_taken(Saved& subject, const std::function<void()>& load) {
  const auto before = bytes_of(subject);
  try {
    load();
  } catch (const std::exception& error) {
    if (bytes_of(subject) != before) {
      throw std::logic_error(std::string("changed by a call that ended with ") + error.what());
    }
    return false;
  }
  const auto after = bytes_of(subject);  // What was taken can be saved and read again.
  auto again = archive_of(after);
  again >> subject;
  return true;
}

template <typename Saved>
bool reads(Saved& subject, const std::string& valid, const Case& bytes) {
  Edits edits(bytes);
  auto archive = archive_of(edited(valid, edits));
  return is_taken(subject, [&] { archive >> subject; });
}

struct Trained {
  std::vector<at::Tensor> parameters{at::linspace(-1, 1, 64 * 64).reshape({64, 64}),
                                     at::linspace(-1, 1, 12).reshape({3, 4}).to(at::kBFloat16)};

  Trained() {
    for (auto& parameter : parameters) {
      parameter.requires_grad_(true);
    }
    fill();
  }
  void fill(double value = 0.5) {
    for (auto& parameter : parameters) {
      parameter.mutable_grad() = at::full(parameter.sizes(), value, parameter.scalar_type());
    }
  }
};

/// A scaler with a past: steps, and steps that were skipped.
GradScaler used_scaler(Trained& trained) {
  GradScaler scaler(GradScalerOptions()
                        .device(c10::kCPU)
                        .min_scale(1.0)
                        .max_scale(0x1p20)
                        .hysteresis(2)
                        .fast_growth_interval(4)
                        .history_size(3));
  torch::optim::SGD optimizer(trained.parameters, torch::optim::SGDOptions(0.1));
  scaler.scale(at::ones({}));
  for (const double gradient : {1.0, HUGE_VAL, 1.0, HUGE_VAL}) {
    trained.fill(gradient);
    scaler.step(optimizer);
    scaler.update();
  }
  return scaler;
}

/// Uses what was loaded: that may fail, with an error.
void use(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): not a crash, and no more
  }
}

bool read_scaler(const Case& bytes) {
  Trained trained;
  auto scaler = used_scaler(trained);
  const bool taken = reads(scaler, bytes_of(scaler), bytes);
  use([&] {
    torch::optim::SGD optimizer(trained.parameters, torch::optim::SGDOptions(0.1));
    scaler.step(optimizer);
    scaler.update();
    static_cast<void>(scaler.overflow_report().str());
  });
  return taken;
}

bool read_guard(const Case& bytes) {
  Trained trained;
  optim::SGD optimizer(trained.parameters, optim::SGDOptions(0.1));
  StepGuard guard(optimizer, StepGuardOptions().history_size(3).spike(
                                 SpikeOptions{.factor = 4.0, .window = 4}));
  for (const double gradient : {1.0, HUGE_VAL, 1.0}) {
    trained.fill(gradient);
    guard.step();
  }
  const bool taken = reads(guard, bytes_of(guard), bytes);
  use([&] { guard.step(); });
  return taken;
}

template <typename Optimizer, typename Options>
bool read_optimizer(const Options& options, const Case& bytes) {
  Trained trained;
  Optimizer optimizer(trained.parameters, options);
  optimizer.step();
  torch::optim::Optimizer& base = optimizer;
  const bool taken = reads(base, bytes_of(base), bytes);
  use([&] { optimizer.step(); });
  return taken;
}

/// A dict with entries left out or replaced.
c10::IValue edited_dict(const c10::IValue& value, Edits& edits) {
  if (value.isGenericDict()) {
    c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
    for (const auto& entry : value.toGenericDict()) {
      if (!edits.hits() || edits.below(4) != 0) {
        dict.insert(entry.key(), edited_dict(entry.value(), edits));
      }
    }
    return dict;
  }
  if (value.isList()) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const c10::IValue& entry : value.toListRef()) {
      list.push_back(edited_dict(entry, edits));
    }
    return list;
  }
  if (!edits.hits()) {
    return value;
  }
  switch (edits.below(3)) {
    case 0:
      return near(value, edits);
    case 1:
      return {};
    default:
      return odd_value(edits);
  }
}

bool read_dict(const Case& bytes) {
  Trained trained;
  auto scaler = used_scaler(trained);
  Edits edits(bytes);
  const auto dict = edited_dict(scaler.state()->to_python(), edits);
  return is_taken(scaler, [&] { scaler.load_state(GradScalerState::from_python(dict)); });
}

}  // namespace

const std::map<std::string, Reader>& readers() {
  static const std::map<std::string, Reader> all{
      {"scaler", read_scaler},
      {"scaler_dict", read_dict},
      {"guard", read_guard},
      {"sgd",
       [](const Case& bytes) {
         return read_optimizer<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9), bytes);
       }},
      {"adamw",
       [](const Case& bytes) {
         return read_optimizer<optim::AdamW>(optim::AdamWOptions(0.1).state_dtype(at::kByte),
                                             bytes);
       }},
      {"muon", [](const Case& bytes) {
         return read_optimizer<optim::Muon>(
             optim::MuonOptions(0.1).master(optim::MasterStorage::kRemainder), bytes);
       }}};
  return all;
}

}  // namespace fastamp::test
