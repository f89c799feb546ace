// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "trace/float8_outcome.h"
#include "trace/recorder.h"

#include <fastamp/autocast/policy.h>
#include <fastamp/autocast/trace.h>
#include <fastamp/macros.h>

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

// The events that autocast emits: calls of ops, and the casts made for them. Which traces are open.
namespace fastamp::autocast {

/// Number of open traces. All that a kernel reads while there are none.
extern std::atomic<int> g_open_traces;

inline bool is_traced() { return g_open_traces.load(std::memory_order_relaxed) != 0; }

enum class CastEvent : std::uint8_t {
  kWeightCast,
  kOtherCast,
  kCacheHit,
  kActivationHit,
  kKeptHit
};

/// Size of a tensor in bytes; 0 if its sizes are symbols, or not known.
std::uint64_t bytes_of(const at::Tensor& tensor);

/// Asks a Python subclass for its number of elements; none if it does not say. Set by the Python
/// module: a class that raises leaves an error in the interpreter, which only Python can take back.
using NumelReader = std::optional<std::int64_t> (*)(const at::Tensor& tensor);
FASTAMP_API void set_numel_reader(NumelReader reader);

/// The op of a call, as the kernel that runs it knows it.
struct TracedOp {
  std::uint16_t number;  ///< Rows are in the order of these.
  std::string name;      ///< As users write it.
  c10::DeviceType device;
  OpPolicy policy;
  c10::ScalarType lower;                          ///< The region's dtype.
  bool (*is_eligible)(const at::Tensor& tensor);  ///< Whether a policy may cast a tensor at all.
};

/// Made around an op call while traces are open: collects its arguments and the casts made for it
/// on this thread, and hands them to the traces at its end, also when the op throws.
class TracedCall {
 public:
  explicit TracedCall(TracedOp op);
  ~TracedCall();
  TracedCall(const TracedCall&) = delete;
  TracedCall& operator=(const TracedCall&) = delete;
  TracedCall(TracedCall&&) = delete;
  TracedCall& operator=(TracedCall&&) = delete;

  /// Takes note of an argument. Types that hold no tensor and no dtype are ignored.
  void see(const at::Tensor& tensor);
  void see(const std::optional<at::Tensor>& tensor);
  void see(const std::optional<c10::ScalarType>& dtype);
  void see(at::TensorList tensors);
  void see(const at::ITensorListRef& tensors);
  template <class T>
  void see(const T& /*argument*/) {}

  void count(CastEvent event, std::uint64_t bytes);
  void note_float8(Float8Outcome outcome) { float8_ = outcome; }

  /// The call in progress on this thread, or nullptr.
  FASTAMP_API static TracedCall* current();

  const TracedOp& op() const { return op_; }
  const std::vector<c10::ScalarType>& inputs() const { return inputs_; }

 private:
  c10::ScalarType run_dtype() const;

  TracedOp op_;
  bool any_eligible_ = false;
  bool first_eligible_ = false;
  bool any_forces_fp32_ = false;
  bool any_sparse_ = false;
  Float8Outcome float8_ = Float8Outcome::kNotAsked;
  std::optional<c10::ScalarType> given_dtype_;
  std::vector<c10::ScalarType> inputs_;
  CastCounts casts_;
  TracedCall* enclosing_;
};

/// Notifies the call in progress, if it is traced, of a cast or of one that was not necessary.
void report_cast(CastEvent event, const at::Tensor& cast);
inline void note_cast(CastEvent event, const at::Tensor& cast) {
  if (is_traced()) [[unlikely]] {
    report_cast(event, cast);
  }
}

/// Notes in the call in progress, if it is traced, whether it runs in fp8, or why not.
void report_float8(Float8Outcome outcome);
inline void note_float8(Float8Outcome outcome) {
  if (is_traced()) [[unlikely]] {
    report_float8(outcome);
  }
}

/// Notifies open traces of a gradient that was cast back.
void report_gradient_cast(const at::Tensor& cast);
inline void note_gradient_cast(const at::Tensor& cast) {
  if (is_traced()) [[unlikely]] {
    report_gradient_cast(cast);
  }
}

/// Starts or stops handing all calls to a recorder. False if that was already so.
FASTAMP_API bool start_recording(const std::shared_ptr<Recorder>& recorder);
FASTAMP_API bool stop_recording(const std::shared_ptr<Recorder>& recorder);

/// Finds the Python code that is calling now. The Python module sets it once.
using CallSiteFinder = CallSite (*)();
FASTAMP_API void set_call_site_finder(CallSiteFinder finder);

}  // namespace fastamp::autocast
