#pragma once

#include "autocast/kernel_entry.h"
#include "autocast/op_ids.h"

#include <fastamp/autocast/policy.h>

#include <torch/library.h>

#include <array>
#include <string>

// Ops that users added to the lists. They have no line in the op table: their kernel is boxed and
// works from the schema at run time. An id, once given to a name, is never given to another: saved
// overrides speak of ids.
namespace fastamp::autocast {

struct RegisteredOp {
  std::string name;  ///< "mylib::op" or "mylib::op.overload"
  OpCapabilities capabilities;
  std::array<OpPolicy, kNumColumns> defaults;
  bool active;  ///< false after unregister_op.
};

/// Ids given out so far, those of inactive ops included. Thread-safe, as all below.
std::size_t num_registered_ops();

RegisteredOp registered_op(OpId op);

/// Puts the boxed kernel of a registered op on a device's autocast key for as long as the library
/// lives.
torch::Library implement_registered(OpId op, Column column);

}  // namespace fastamp::autocast
