// SPDX-License-Identifier: Apache-2.0
#include "autocast/op_names.h"
#include "autocast/op_policy.h"
#include "autocast/registration.h"

#include <fastamp/autocast/policy_preset.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/env.h>

#include <algorithm>
#include <array>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace fastamp {
namespace {

using Words = std::set<std::string, std::less<>>;

/// Ops that are in no list of torch and round their results, without composite ones, whose parts
/// are here. tests/python/autocast/test_presets.py compares them with all ops that torch has.
constexpr const char* kRounding =
    "_adaptive_avg_pool2d _embedding_bag acosh add affine_grid_generator angle asinh atan "
    "atanh avg_pool2d celu col2im cos deg2rad digamma div elu erf erfc exp2 floor_divide fmod "
    "frac gelu glu hardsigmoid hardswish hypot i0 igamma igammac index_add index_reduce ldexp "
    "leaky_relu lerp lgamma linalg__powsum linalg_cross linalg_ldl_factor_ex linalg_ldl_solve "
    "linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_pinv "
    "linalg_solve_triangular log_sigmoid_forward logaddexp logaddexp2 logcumsumexp logit mean "
    "mish mul mvlgamma nansum native_dropout native_group_norm native_norm norm polygamma "
    "rad2deg remainder rrelu_with_noise_functional rsub scatter scatter_reduce segment_reduce "
    "sigmoid silu sin sinc softshrink sqrt std std_mean sub tanh var var_mean xlogy";
constexpr std::string_view kSpecial = "special_";  // all of torch.special that is no composite
/// Lines of the op table that "OD" leaves: products that run their parts, and ops that move values.
constexpr const char* kLeft = "_grouped_mm cat index_copy index_put stack tensordot";
/// Ops that "wide" runs in float32.
constexpr const char* kWide =
    "batch_norm binary_cross_entropy binary_cross_entropy_with_logits cdist "
    "cosine_embedding_loss cosine_similarity cross_entropy_loss ctc_loss dist frobenius_norm "
    "group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm linalg_matrix_norm "
    "linalg_vector_norm log_softmax logsumexp margin_ranking_loss mse_loss multi_margin_loss "
    "multilabel_margin_loss multilabel_margin_loss_forward native_layer_norm nll_loss "
    "nll_loss2d norm nuclear_norm pdist poisson_nll_loss renorm rms_norm smooth_l1_loss "
    "soft_margin_loss softmax std std_mean triplet_margin_loss var var_mean";

/// Ops that "supported" runs in float32 if an argument is sparse: torch has no 16-bit kernels for
/// CSR on the CPU, nor for coordinates on CUDA.
constexpr const char* kProducts = "addbmm addmm addmv addr baddbmm bmm linear matmul mm mv";
/// Products of sparse tensors that are in no list of torch.
constexpr const char* kSparseProducts =
    "_sparse_mm_reduce_impl _sparse_sparse_matmul hspmm sparse_sampled_addmm";
constexpr std::string_view kFft = "fft_";
constexpr std::string_view kStft = "stft";

constexpr std::string_view kAten = "aten::";
constexpr std::string_view kEveryOp = "*";

Words words_of(const char* text) {
  std::istringstream stream(text);
  Words words;
  for (std::string word; stream >> word;) {
    words.insert(word);
  }
  return words;
}

std::string base_of(const std::string& op) { return op.substr(0, op.find('.')); }

bool can_be_cast(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  const auto is_written = [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  };
  const auto has_tensor = [](const c10::Argument& argument) {
    return argument.type()->str().find("Tensor") != std::string::npos;
  };
  return std::ranges::none_of(arguments, is_written) &&
         std::ranges::any_of(arguments, has_tensor) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

/// Registers ops of torch that are not in the op table as `pass`; no composites.
/// @param prefix  All ops whose names begin so, too; empty: none.
void list(const Words& bases, std::string_view prefix) {
  Words known;
  for (const auto& row : op_table()) {
    known.insert(row.op);
  }
  Words found;
  for (const auto& each : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!each.name.starts_with(kAten)) {
      continue;
    }
    const auto base = each.name.substr(kAten.size());
    const auto op = each.overload_name.empty() ? base : base + '.' + each.overload_name;
    const bool wanted = bases.contains(base) || (!prefix.empty() && base.starts_with(prefix));
    const auto handle = c10::Dispatcher::singleton().findSchema(each);
    if (wanted && !known.contains(op) && handle && can_be_cast(*handle)) {
      found.insert(std::string(kAten) + op);
    }
  }
  for (const auto& name : found) {
    register_op(name, OpPolicy::kPass);
  }
}

OpPolicy under_supported(const OpTableRow& row, OpPolicy usual) {
  static const auto products = words_of(kProducts);
  static const auto sparse_products = words_of(kSparseProducts);
  const auto base = base_of(row.op);
  if (base.starts_with(kFft) || base.starts_with(kStft) || sparse_products.contains(base)) {
    return OpPolicy::kFp32;
  }
  return usual == OpPolicy::kLower && products.contains(base) ? OpPolicy::kLowerDense : usual;
}

OpPolicy under_od(const OpTableRow& row, OpPolicy usual, const Words& left) {
  const bool is_lowered =
      row.cpu_default == OpPolicy::kLower || row.cuda_default == OpPolicy::kLower;
  const bool is_other = row.op.find("::") != std::string::npos;
  return is_other || is_lowered || left.contains(base_of(row.op)) || usual == OpPolicy::kBanned
             ? usual
             : OpPolicy::kFp32;
}

constexpr const char* kBlanks = " \t\r\n";

std::string stripped(const std::string& text) {
  const auto begin = text.find_first_not_of(kBlanks);
  return begin == std::string::npos
             ? ""
             : text.substr(begin, text.find_last_not_of(kBlanks) + 1 - begin);
}

}  // namespace

std::vector<OpPolicyEdit> detail::op_policy_preset(const char* function, std::string_view name,
                                                   std::optional<c10::DeviceType> device) {
  constexpr std::array<std::string_view, 6> kNames{"torch", "cuda",      "OD",
                                                   "wide",  "supported", "unify"};
  TORCH_CHECK_VALUE(std::ranges::find(kNames, name) != kNames.end(), function,
                    ": expected name to be one of ", c10::Join(", ", kNames), ", got '", name,
                    "'.");
  autocast::find_policy_devices(function, device);
  const auto left = words_of(kLeft);
  const auto wide = words_of(kWide);
  if (name == "OD") {
    list(words_of(kRounding), kSpecial);
  } else if (name == "wide") {
    list(wide, "");
  } else if (name == "supported") {
    list(words_of(kSparseProducts), "");
  }
  std::vector<OpPolicyEdit> edits;
  for (const auto each : {c10::kCPU, c10::kCUDA}) {
    if (device && *device != each) {
      continue;
    }
    for (const auto& row : op_table()) {
      if (row.op == kEveryOp) {
        continue;
      }
      auto policy = each == c10::kCPU && name != "cuda" ? row.cpu_default : row.cuda_default;
      const bool is_torchs = row.op.find("::") == std::string::npos;
      if (name == "OD") {
        policy = under_od(row, policy, left);
      } else if (name == "supported" && is_torchs) {
        policy = under_supported(row, policy);
      } else if (name == "wide" && is_torchs && wide.contains(base_of(row.op))) {
        policy = OpPolicy::kFp32;
      }
      // A name that stands for one overload.
      auto op = row.op.find('.') == std::string::npos ? row.op + ".default" : row.op;
      edits.push_back({std::move(op), policy, each});
    }
    edits.push_back(
        {std::string(kEveryOp), name == "unify" ? OpPolicy::kUnify : OpPolicy::kPass, each});
  }
  return edits;
}

std::vector<OpPolicyEdit> op_policy_preset(std::string_view name,
                                           std::optional<c10::DeviceType> device) {
  return detail::op_policy_preset("op_policy_preset", name, device);
}

std::vector<OpPolicyEdit> policy_preset(c10::DeviceType source, c10::DeviceType device) {
  autocast::ensure_policies_loaded();
  const auto from = autocast::find_policy_devices("policy_preset", source).front();
  const auto to = autocast::find_policy_devices("policy_preset", device).front();
  std::vector<OpPolicyEdit> edits;
  for (const autocast::OpId op : autocast::all_ops()) {
    const auto wanted = autocast::policy_of(op, from);
    if (autocast::policy_of(op, to) != wanted) {
      edits.push_back({autocast::short_name(op), wanted, device});
    }
  }
  return edits;
}

std::vector<std::pair<std::string, std::string>> detail::split_policies(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::pair<std::string, std::string>> found;
  for (std::string entry; std::getline(stream, entry, ',');) {
    entry = stripped(entry);
    if (entry.empty()) {
      continue;
    }
    const auto equals = entry.find('=');
    const auto op = stripped(entry.substr(0, equals));
    TORCH_CHECK_VALUE(equals != std::string::npos && !op.empty(),
                      "FASTAMP_POLICY: expected policies such as 'layer_norm=lower,pow=fp32', got "
                      "'",
                      entry, "'");
    found.emplace_back(op, stripped(entry.substr(equals + 1)));
  }
  return found;
}

void policies_from_environment() {
  if (!c10::utils::get_env("FASTAMP_POLICY_FILE").value_or("").empty()) {
    TORCH_WARN(
        "policies_from_environment: FASTAMP_POLICY_FILE is read in Python only; C++ takes "
        "FASTAMP_POLICY.");
  }
  const auto text = c10::utils::get_env("FASTAMP_POLICY").value_or("");
  std::vector<OpPolicyEdit> edits;
  for (const auto& [op, policy] : detail::split_policies(text)) {
    edits.push_back({op, autocast::policy_named("FASTAMP_POLICY: expected policy", policy)});
  }
  detail::checked_op_policies("FASTAMP_POLICY", edits);  // refuses before anything is changed
  for (const auto& edit : edits) {
    set_op_policy(edit.op, edit.policy);
  }
}

}  // namespace fastamp
