// SPDX-License-Identifier: Apache-2.0
#include "autocast/op_names.h"

#include <fastamp/autocast/policy_preset.h>

#include <c10/util/Exception.h>
#include <c10/util/env.h>

#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace fastamp {
namespace {

constexpr const char* kBlanks = " \t\r\n";

std::string stripped(const std::string& text) {
  const auto begin = text.find_first_not_of(kBlanks);
  return begin == std::string::npos
             ? ""
             : text.substr(begin, text.find_last_not_of(kBlanks) + 1 - begin);
}

}  // namespace

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
