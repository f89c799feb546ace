// SPDX-License-Identifier: Apache-2.0
#pragma once

// Notes for Python's sake that some thread has state of fastamp that torch has no place for. See
// fastamp._dynamo.carried_state.
namespace fastamp::python {

/// Op policies of a block, or the recipe of a region alone.
enum class StateKind : bool { kRecipe, kPolicies };

/// Counts a thread that has state from now on. With the first one, names in torch stand for
/// wrappers. Needs the GIL.
/// @throws pybind11::error_already_set  A wrapper cannot be made, or compiled code is running and
/// would have to be left; nothing is changed then.
void hold_state(StateKind kind);

/// Ends a hold of the same kind. With the last one, the names stand for what they did. Needs the
/// GIL.
void let_go_of_state(StateKind kind) noexcept;

/// A hold of op policies until the end of a block of C++.
class HeldPolicies {
 public:
  HeldPolicies() { hold_state(StateKind::kPolicies); }
  ~HeldPolicies() { let_go_of_state(StateKind::kPolicies); }
  HeldPolicies(const HeldPolicies&) = delete;
  HeldPolicies& operator=(const HeldPolicies&) = delete;
  HeldPolicies(HeldPolicies&&) = delete;
  HeldPolicies& operator=(HeldPolicies&&) = delete;
};

}  // namespace fastamp::python
