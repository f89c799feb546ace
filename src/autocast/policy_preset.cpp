// SPDX-License-Identifier: Apache-2.0
#include "autocast/op_names.h"
#include "autocast/policy_table.h"
#include "autocast/registration.h"

#include <fastamp/autocast/policy_preset.h>

#include <vector>

namespace fastamp {

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

}  // namespace fastamp
