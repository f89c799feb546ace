// SPDX-License-Identifier: Apache-2.0
#include "float8/recipe.h"

#include "autocast/float8_interface.h"
#include "autocast/torch_state.h"
#include "core/build_config.h"
#include "core/dtypes.h"
#include "core/kernel_devices.h"
#include "float8/dynamo_guard_state.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>
#include <limits>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

namespace fastamp::autocast {

std::atomic<bool> g_float8_was_used{false};

namespace {

constexpr std::array<std::string_view, 4> kOpNames{"linear", "addmm", "mm", "matmul"};

/// Plain pointers: nothing to destroy when a thread ends.
constinit thread_local std::array<const Float8Setting*, kNumPolicyDevices> t_settings{};

constinit std::array<std::atomic<const Float8Setting*>, kNumPolicyDevices> g_defaults{};

struct AtomicDefaultUse {
  std::atomic<bool> acted{false};
  std::atomic<bool> met_float16{false};
};

constinit std::array<AtomicDefaultUse, kNumPolicyDevices> g_default_uses{};

/// Writes only what is not there yet: many threads run ops.
void note(std::atomic<bool>& seen) noexcept {
  if (!seen.load(std::memory_order_relaxed)) {
    seen.store(true, std::memory_order_relaxed);
  }
}

/// The number is one that is never given to a recipe.
constexpr Float8Setting kNoFloat8{.small_size = std::nullopt,
                                  .number = std::numeric_limits<std::uint32_t>::max()};

struct Settings {
  std::mutex mutex;
  std::deque<Float8Setting> all;  ///< Number n at n - 1. There are few different ones.
};

/// Never destroyed: other threads may run ops while the process exits.
Settings& settings() {
  static auto* interned = new Settings;
  return *interned;
}

bool is_format(c10::ScalarType dtype) {
  return dtype == c10::kFloat8_e4m3fn || dtype == c10::kFloat8_e5m2;
}

void check_format(const char* function, const char* name, c10::ScalarType dtype) {
  TORCH_CHECK_VALUE(is_format(dtype), function, ": expected ", name,
                    " of the recipe to be float8_e4m3fn or float8_e5m2, got ", dtype, ".");
}

std::uint8_t ops_of(const char* function, const std::vector<std::string>& names) {
  unsigned ops = 0;
  for (const auto& name : names) {
    const auto* const found = std::ranges::find(kOpNames, name);
    TORCH_CHECK_VALUE(found != kOpNames.end(), function,
                      ": expected ops of the recipe to be among ", c10::Join(", ", kOpNames),
                      ", got '", name, "'.");
    ops |= 1U << static_cast<unsigned>(found - kOpNames.begin());
  }
  return static_cast<std::uint8_t>(ops);
}

std::uint32_t number_of(const Float8Setting* setting) {
  return setting == nullptr ? 0 : setting->number;
}

/// The element of a table by device; null for devices that have no policies.
template <class Table>
auto* slot_in(Table& table, c10::DeviceType device) {
  if (device == c10::kCPU) {
    return &table[static_cast<std::size_t>(PolicyDevice::kCpu)];
  }
  return device == c10::kCUDA ? &table[static_cast<std::size_t>(PolicyDevice::kCuda)] : nullptr;
}

constexpr int kFirstFloat8Capability = 89;

bool gpu_has_float8(const char* function, c10::ScalarType base_dtype) {
  static const bool has_cuda = at::Context::hasCUDA();
  if (!has_cuda) {
    return true;  // The region is going to be disabled, for that reason.
  }
  const int capability = compute_capability();
  if (capability == 0) {
    TORCH_WARN_ONCE(function,
                    ": expected a build of fastamp with its CUDA part for fp8 on a GPU, got one "
                    "without. The region runs in ",
                    base_dtype, ".");
  } else if (capability < kFirstFloat8Capability) {
    TORCH_WARN_ONCE(function, ": expected a GPU of compute capability 8.9 or later for fp8, got ",
                    capability / 10, ".", capability % 10, ". The region runs in ", base_dtype,
                    ".");
  }
  return capability >= kFirstFloat8Capability;
}

const Float8Setting* checked_setting(const char* function, c10::DeviceType device,
                                     const Float8Recipe& recipe, c10::ScalarType base_dtype) {
  TORCH_CHECK_VALUE(device == c10::kCPU || device == c10::kCUDA, function,
                    ": expected the device of a region with an fp8 recipe to be cpu or cuda, got ",
                    c10::DeviceTypeName(device, true), ".");
  const auto* const setting = float8_setting(function, recipe, base_dtype);
  TORCH_CHECK(FASTAMP_HAVE_SCALED_MM, function,
              ": expected a torch with _scaled_mm for an fp8 recipe, got one without when fastamp "
              "was built.");
  return setting;
}

/// Warns, once in the process.
void warn_of_slow_float8(const char* function) {
  TORCH_WARN_ONCE(function,
                  ": fp8 on the CPU is a reference: it computes what a GPU does, several times as "
                  "slow as bfloat16. (This is said once.)");
}

}  // namespace

std::string_view to_string(Float8Op op) { return kOpNames.at(static_cast<std::size_t>(op)); }

const Float8Setting* float8_setting(const char* function, const Float8Recipe& recipe,
                                    c10::ScalarType base_dtype) {
  check_format(function, "forward_dtype", recipe.forward_dtype());
  check_format(function, "grad_dtype", recipe.grad_dtype());
  TORCH_CHECK_VALUE(
      recipe.forward_dtype() == c10::kFloat8_e4m3fn || recipe.grad_dtype() == c10::kFloat8_e4m3fn,
      function,
      ": expected forward_dtype or grad_dtype of the recipe to be float8_e4m3fn, "
      "got float8_e5m2 for both, whose product no GPU computes.");
  TORCH_CHECK_VALUE(is_16_bit(base_dtype), function,
                    ": expected the dtype of a region with an fp8 recipe to be bfloat16 or "
                    "float16, which all else runs in, got ",
                    base_dtype, ".");
  const auto [k, n] = recipe.small_size().value_or(Float8Recipe::kSmallOnGpu);
  TORCH_CHECK_VALUE(k >= 0 && n >= 0, function,
                    ": expected small_size of the recipe to be at least 0, got (", k, ", ", n,
                    ").");
  Float8Setting wanted{.base_dtype = base_dtype,
                       .forward_dtype = recipe.forward_dtype(),
                       .grad_dtype = recipe.grad_dtype(),
                       .fast_accumulate = recipe.fast_accumulate(),
                       .ops = ops_of(function, recipe.ops()),
                       .small_size = recipe.small_size()};
  auto& interned = settings();
  const std::scoped_lock lock(interned.mutex);
  for (const auto& setting : interned.all) {
    wanted.number = setting.number;
    if (setting == wanted) {
      return &setting;
    }
  }
  wanted.number = static_cast<std::uint32_t>(interned.all.size() + 1);
  return &interned.all.emplace_back(wanted);  // A deque's elements stay where they are.
}

const Float8Setting* float8_setting_numbered(std::uint32_t number) {
  if (number == 0 || number == kNoFloat8.number) {
    return number == 0 ? nullptr : &kNoFloat8;
  }
  auto& interned = settings();
  const std::scoped_lock lock(interned.mutex);
  return &interned.all.at(number - 1);
}

Float8Recipe recipe_of(const Float8Setting& setting) {
  std::vector<std::string> ops;
  for (std::size_t i = 0; i < kOpNames.size(); ++i) {
    if (setting.runs(static_cast<Float8Op>(i))) {
      ops.emplace_back(kOpNames[i]);
    }
  }
  auto recipe = Float8Recipe()
                    .forward_dtype(setting.forward_dtype)
                    .grad_dtype(setting.grad_dtype)
                    .fast_accumulate(setting.fast_accumulate)
                    .ops(std::move(ops));
  if (setting.small_size.has_value()) {
    recipe.small_size((*setting.small_size)[0], (*setting.small_size)[1]);
  }
  return recipe;
}

const Float8Setting* thread_float8_slow(c10::DeviceType device) noexcept {
  const auto* const slot = slot_in(t_settings, device);
  return slot == nullptr ? nullptr : *slot;
}

void set_thread_float8_slow(c10::DeviceType device, const Float8Setting* setting) noexcept {
  auto* const slot = slot_in(t_settings, device);
  if (slot == nullptr) {
    return;
  }
  if (setting != nullptr) {
    g_float8_was_used.store(true, std::memory_order_relaxed);
  }
  if (*slot != setting) {
    *slot = setting;
    mirror_float8(number_of(t_settings[0]), number_of(t_settings[1]));
  }
}

void set_default_float8(c10::DeviceType device, const Float8Setting* setting) noexcept {
  auto* const slot = slot_in(g_defaults, device);
  if (slot == nullptr) {
    return;
  }
  if (setting != nullptr) {
    auto* const use = slot_in(g_default_uses, device);
    use->acted.store(false, std::memory_order_relaxed);
    use->met_float16.store(false, std::memory_order_relaxed);
    g_float8_was_used.store(true, std::memory_order_relaxed);
  }
  slot->store(setting, std::memory_order_relaxed);
}

DefaultFloat8Use default_float8_use(c10::DeviceType device) noexcept {
  const auto* const use = slot_in(g_default_uses, device);
  return use == nullptr
             ? DefaultFloat8Use()
             : DefaultFloat8Use{.acted = use->acted.load(std::memory_order_relaxed),
                                .met_float16 = use->met_float16.load(std::memory_order_relaxed)};
}

const Float8Setting* no_float8(c10::DeviceType device) noexcept {
  const auto* const slot = slot_in(g_defaults, device);
  return slot == nullptr || slot->load(std::memory_order_relaxed) == nullptr ? nullptr : &kNoFloat8;
}

const Float8Setting* float8_in_force_slow(PolicyDevice device) {
  const auto index = static_cast<std::size_t>(device);
  const auto* setting = t_settings[index];
  const bool is_default = setting == nullptr;
  if (is_default) {
    setting = g_defaults[index].load(std::memory_order_relaxed);
  }
  if (setting == nullptr) {
    return nullptr;
  }
  const auto dtype = region_dtype(device_type(device));
  if (dtype != setting->base_dtype) {
    if (is_default && dtype == c10::kHalf) {
      note(g_default_uses[index].met_float16);
    }
    return nullptr;
  }
  note(g_default_uses[index].acted);
  if (is_default && device == PolicyDevice::kCpu) {
    warn_of_slow_float8("autocast");  // Regions with a recipe of their own have said it.
  }
  return setting;
}

const Float8Setting* float8_of_region(const char* function, c10::DeviceType device,
                                      const Float8Recipe& recipe, c10::ScalarType base_dtype) {
  const auto* const setting = checked_setting(function, device, recipe, base_dtype);
  if (device == c10::kCUDA) {
    return gpu_has_float8(function, base_dtype) ? setting : nullptr;
  }
  warn_of_slow_float8(function);
  return setting;
}

void start_default_float8(const char* function, c10::DeviceType device,
                          const Float8Recipe& recipe) {
  constexpr auto kBaseDtype = c10::ScalarType::BFloat16;
  const auto* const setting = checked_setting(function, device, recipe, kBaseDtype);
  const bool can_run = device != c10::kCUDA || gpu_has_float8(function, kBaseDtype);
  set_default_float8(device, can_run ? setting : nullptr);
}

void check_float8_dtype(const char* function, c10::ScalarType dtype) {
  TORCH_CHECK_VALUE(dtype == c10::kFloat8_e4m3fn, function,
                    ": expected dtype to be bfloat16, float16 or float8_e4m3fn, which stands for "
                    "bfloat16 with the default fp8 recipe, got ",
                    dtype, ". Give other formats to a recipe.");
}

}  // namespace fastamp::autocast

namespace fastamp {

std::optional<Float8Recipe> float8_recipe(c10::DeviceType device) {
  using autocast::PolicyDevice;
  const bool has_policies = device == c10::kCPU || device == c10::kCUDA;
  if (!has_policies || !at::autocast::is_autocast_enabled(device)) {
    return std::nullopt;
  }
  const auto* const setting =
      autocast::float8_in_force(device == c10::kCPU ? PolicyDevice::kCpu : PolicyDevice::kCuda);
  return setting == nullptr ? std::nullopt : std::optional(autocast::recipe_of(*setting));
}

}  // namespace fastamp
