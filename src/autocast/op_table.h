// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/autocast/policy.h>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torch {
class Library;
}

// The ops that autocast can act on: those of op_table.inc, and those that users registered. Their
// ids, the devices on which they have policies, and the kernels of the table's.
namespace fastamp::autocast {

/// Position of each op in the op table.
enum class OpId : std::uint16_t {  // NOLINT(performance-enum-size): 216 lines and growing
#define FASTAMP_OP(op, cpu, cuda) op,
#define FASTAMP_OP_APPEND(op, cpu, cuda, redispatch) op,
#define FASTAMP_OP_CUSTOM(op, cpu, cuda, Kernel) op,
#include "autocast/torch_op_table.inc"
#undef FASTAMP_OP
#undef FASTAMP_OP_APPEND
#undef FASTAMP_OP_CUSTOM
};

inline constexpr std::size_t kNumOps = 0
#define FASTAMP_OP(op, cpu, cuda) +1
#define FASTAMP_OP_APPEND(op, cpu, cuda, redispatch) +1
#define FASTAMP_OP_CUSTOM(op, cpu, cuda, Kernel) +1
#include "autocast/torch_op_table.inc"
#undef FASTAMP_OP
#undef FASTAMP_OP_APPEND
#undef FASTAMP_OP_CUSTOM
    ;

/// Ops that users register take the ids after the table's.
inline constexpr std::size_t kMaxRegisteredOps = 256;
/// Stands for every op that has no policy but pass. Its own is pass or unify.
inline constexpr auto kEveryOp = static_cast<OpId>(kNumOps + kMaxRegisteredOps);
inline constexpr std::size_t kNumSlots = kNumOps + kMaxRegisteredOps + 1;

/// A device for which ops have a policy: a column of the op table. The values index arrays.
enum class PolicyDevice : std::uint8_t { kCpu, kCuda };
inline constexpr std::size_t kNumPolicyDevices = 2;

constexpr c10::DeviceType device_type(PolicyDevice device) {
  return device == PolicyDevice::kCpu ? c10::DeviceType::CPU : c10::DeviceType::CUDA;
}

constexpr c10::DispatchKey autocast_key(PolicyDevice device) {
  return device == PolicyDevice::kCpu ? c10::DispatchKey::AutocastCPU
                                      : c10::DispatchKey::AutocastCUDA;
}

inline bool is_on(const at::Tensor& tensor, PolicyDevice device) {
  // The two odd backends are torch's rule: oneDNN tensors follow the CPU region, XLA tensors the
  // CUDA one.
  return device == PolicyDevice::kCpu ? tensor.is_cpu() || tensor.is_mkldnn()
                                      : tensor.is_cuda() || tensor.is_xla();
}

/// Whether autocast may cast this tensor at all. False for an undefined tensor.
inline bool is_eligible(const at::Tensor& tensor, PolicyDevice device) {
  const auto dtype = tensor.scalar_type();
  return c10::isFloatingType(dtype) && dtype != c10::kDouble && is_on(tensor, device);
}

/// The dtype test comes first: most tensors of a region already have the dtype wanted.
inline bool needs_cast(const at::Tensor& tensor, c10::ScalarType to, PolicyDevice device) {
  return tensor.scalar_type() != to && is_eligible(tensor, device);
}

/// Policies that the schema of an op allows; fixed at compile time.
struct OpCapabilities {
  bool lower;          ///< Has a tensor argument to cast, and writes none.
  bool fp32;           ///< Can run in another dtype too: promote makes sense and, with lower, fp32.
  bool set_opt_dtype;  ///< First argument is a tensor and there is an optional dtype.
  bool append_dtype;   ///< The table names an overload that takes an output dtype.
  bool unify = false;  ///< Has a boxed kernel and arguments that may be of several dtypes.
};

/// Everything needed to register the autocast kernel of one op.
struct KernelEntry {
  const char* name;      ///< "aten::mm"
  const char* overload;  ///< "" or "int"
  OpCapabilities capabilities;
  void (*implement)(torch::Library& library, const char* qualified_name, PolicyDevice device);

  std::string qualified_name() const {
    return *overload == '\0' ? name : std::string(name) + "." + overload;
  }
};

inline constexpr std::size_t kNumKernelParts = 4;

/// The part that compiles the kernel of an op.
constexpr std::size_t part_of(OpId op) { return static_cast<std::size_t>(op) % kNumKernelParts; }

/// Fills the entries whose index is kPart modulo kNumKernelParts.
template <std::size_t kPart>
void fill_kernel_entries(std::array<KernelEntry, kNumOps>& entries);

/// One entry per line of the op table, indexed by OpId.
const std::array<KernelEntry, kNumOps>& kernel_entries();

/// Whether an op with these capabilities can have this policy.
bool can_carry(const OpCapabilities& capabilities, OpPolicy policy);

// -- Ops that users registered. They have no line in the op table: their kernel is boxed and works
// from the schema at run time. An id, once given to a name, is never given to another: saved
// overrides speak of ids.

struct RegisteredOp {
  std::string name;  ///< "mylib::op" or "mylib::op.overload"
  OpCapabilities capabilities;
  std::array<OpPolicy, kNumPolicyDevices> defaults;
  bool active;  ///< false after unregister_op.
};

/// Ids given out so far, those of inactive ops included. Thread-safe, as all below.
std::size_t num_registered_ops();

RegisteredOp registered_op(OpId op);

/// The id of a name, new or old; the capabilities of an old one are replaced.
/// @throws c10::ValueError if there are no more ids.
OpId add_registered_op(const RegisteredOp& op);

/// Shows the op in the lists, with a default policy on some devices.
void activate_registered_op(OpId op, OpPolicy policy, const std::vector<PolicyDevice>& devices);

/// Takes the op out of the lists; its default policies are `pass`.
void deactivate_registered_op(OpId op);

}  // namespace fastamp::autocast
