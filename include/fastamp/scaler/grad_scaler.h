// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/macros.h>
#include <fastamp/scaler/agreement.h>
#include <fastamp/scaler/on_skip.h>
#include <fastamp/scaler/reports.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fastamp {

class GraphedStep;
class StepLog;

/// Options of a GradScaler; every setter returns the object, so that they can be chained.
///
/// Source: the first six are torch.amp.GradScaler's arguments with its defaults.
struct FASTAMP_API GradScalerOptions {
  /// Kind of device that holds the scale; decides which tensors update() accepts.
  TORCH_ARG(c10::DeviceType, device) = c10::kCUDA;
  /// First scale (dimensionless); finite.
  TORCH_ARG(double, init_scale) = 65536.0;
  /// Factor of the scale after `growth_interval` iterations in a row without overflow; above 1.
  TORCH_ARG(double, growth_factor) = 2.0;
  /// Factor of the scale after an iteration with an overflow; below 1.
  TORCH_ARG(double, backoff_factor) = 0.5;
  /// Iterations without overflow between two growths; 0: it never grows.
  TORCH_ARG(int64_t, growth_interval) = 2000;
  /// A disabled scaler passes everything through unchanged.
  TORCH_ARG(bool, enabled) = true;
  /// Lower bound that update() keeps; above 0. None by default, as torch.
  TORCH_ARG(std::optional<double>, min_scale) = std::nullopt;
  /// Upper bound that update() keeps; at least min_scale. None by default, as torch.
  TORCH_ARG(std::optional<double>, max_scale) = std::nullopt;
  /// Number of overflows in a row that it takes to lower the scale; at least 1. Steps are skipped
  /// at every one of them.
  TORCH_ARG(int64_t, hysteresis) = 1;
  /// Iterations without overflow between two growths until the scale first falls, and, after it
  /// fell several times in a row, until it is back where the first fall had left it; at least 1.
  /// None by default, as torch: growth_interval always. The exact rule is in docs/scaler.md.
  TORCH_ARG(std::optional<int64_t>, fast_growth_interval) = std::nullopt;
  /// Calls optim::fuse_() on every torch::optim::SGD, Adam and AdamW that step() or a clip meets.
  TORCH_ARG(bool, fuse) = false;
  /// Leaves gradients scaled and unclipped after a fused step, which saves writing them.
  TORCH_ARG(bool, keep_scaled_grads) = false;
  /// Iterations that history() remembers, on the device; 0: none, at most 2^24 - 1.
  TORCH_ARG(int64_t, history_size) = 128;
  /// Makes overflows known to other ranks, so that all skip: agree_over(process_group), or a lambda
  /// as in <fastamp/scaler/agreement.h>. None by default: no communication. Norms are those of the
  /// rank's own gradients in any case.
  TORCH_ARG(FlagAgreement, agreement) = nullptr;
  /// Callback, as if register_on_skip() had been called with it. None by default.
  TORCH_ARG(SkipCallback, on_skip) = nullptr;
};

/// State of a scaler between iterations. The first five fields are the entries of
/// torch.amp.GradScaler.state_dict() ("scale", "growth_factor", "backoff_factor",
/// "growth_interval", "_growth_tracker"), the six below them are empty unless the option is in
/// use, and the last three report past iterations.
struct FASTAMP_API GradScalerState {
  double scale = 65536.0;
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  int64_t growth_tracker = 0;
  std::optional<double> min_scale;
  std::optional<double> max_scale;
  std::optional<int64_t> hysteresis;
  std::optional<int64_t> hysteresis_tracker;
  std::optional<int64_t> fast_growth_interval;
  /// Growth is fast up to its magnitude: infinite until the scale first falls; negative from a fall
  /// until the next growth.
  std::optional<double> fast_growth_limit;
  std::vector<StepRecord> history;  ///< Of consecutive steps, oldest first.
  OverflowReport overflow_report;   ///< Parameters by number: what their names were is not known.
  int64_t skipped_in_a_row = 0;

  /// Reads the state_dict() of a Python scaler, fastamp's or torch's, as torch.save stored it by
  /// itself: `torch.save(scaler.state_dict(), "scaler.pt")`.
  ///
  /// @code
  ///   std::ifstream file("scaler.pt", std::ios::binary);
  ///   const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  ///   scaler.load_state(fastamp::GradScalerState::from_python(torch::pickle_load(bytes)));
  /// @endcode
  ///
  /// @param state_dict  What torch::pickle_load returned, or an entry of that dict. LibTorch reads
  ///     integers below 2^31, and no file that also holds the state_dict of a module.
  /// @returns nullopt for the empty one of a disabled scaler.
  /// @throws c10::ValueError if it is something else, or lacks one of torch's five entries.
  static std::optional<GradScalerState> from_python(const c10::IValue& state_dict);

  /// Returns it as a dict for Python's load_state_dict(), fastamp's or torch's: write the bytes of
  /// `torch::pickle_save(state.to_python())` and read them by
  /// `torch.load("scaler.pt", weights_only=False)`. (LibTorch notes the types of a dict by a
  /// function of torch.jit that torch.load does not take for a weight.)
  c10::IValue to_python() const;
};

/// The numbers, and a line each for what is in use of the rest; for people.
FASTAMP_API std::ostream& operator<<(std::ostream& out, const GradScalerState& state);

/// Scales losses so that fp16 gradients do not underflow, and skips the steps whose gradients
/// overflowed.
///
/// One iteration is `scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update();`.
/// The scale stays on the device. With an optimizer of fastamp::optim, or one that optim::fuse_()
/// was called on, the step is one fused pass that is skipped on the device, and nothing in an
/// iteration waits for it; with any other, step() waits for one flag per device. Besides that, only
/// what says so waits. Every refused call throws before anything is changed. One object must not be
/// used by two threads at once; different objects are independent.
///
/// It may be moved at any time, also in the middle of an iteration. Every call on the object that
/// it was moved from throws c10::Error, until another scaler is assigned to that.
///
/// Source: torch.amp.GradScaler (torch 2.11), whose trajectory it follows bit for bit; the
/// differences are listed in docs/scaler.md.
class FASTAMP_API GradScaler {
 public:
  /// @throws c10::ValueError if min_scale, max_scale, hysteresis, fast_growth_interval or
  ///     history_size is out of its range, or if the scaler is enabled and growth_factor <= 1,
  ///     backoff_factor >= 1, growth_interval < 0 or init_scale not finite.
  /// @note Warns and starts disabled for device kCUDA when there is no CUDA device.
  explicit GradScaler(const GradScalerOptions& options = {});
  /// Makes one of `GradScalerOptions().device(device.type())`: `GradScaler(torch::kCPU)`. Of a
  /// torch::Device only the type counts; the scale goes where the first outputs are.
  explicit GradScaler(c10::Device device) : GradScaler(GradScalerOptions().device(device.type())) {}
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  /// Returns outputs * scale (any shape and floating dtype; differentiable). The first call puts
  /// the scale on outputs' device. A 0-d fp16 or bf16 loss gives an fp32 result, as in torch.
  /// @throws c10::ValueError if a tensor is undefined.
  at::Tensor scale(const at::Tensor& outputs);
  /// Scales several tensors, which may live on several devices.
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  /// Divides the gradients of `optimizer` by the scale, in place, and notes whether one is inf or
  /// NaN. For code that looks at gradients before step(), such as clipping; optional otherwise.
  /// @throws c10::Error before scale(), and if called twice, or after step(), in one iteration.
  /// @throws c10::ValueError for fp16 gradients.
  /// @note A sparse fp16 gradient is replaced by its coalesced form. A gradient that comes twice is
  ///     unscaled once, as with tied weights.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Makes a pass whose gradients the program uses by itself, ahead of others in the same
  /// iteration: the first one of SAM, or each of a closure that LBFGS calls.
  ///
  /// Afterwards gradients are unscaled, or 0 if one was inf or NaN, in this pass or one before:
  /// nothing moves by them. That is noted as an overflow of the iteration, so step() is skipped and
  /// update() lowers the scale. The next pass has to begin with zero_grad().
  /// @param optimizer  Whose gradients it makes.
  /// @param closure  Gives a loss to scale(), calls backward, returns what pass_() is to return.
  /// @returns What the closure returned. A disabled scaler does nothing else.
  /// @throws c10::Error after unscale_() or step() of the optimizer in this iteration, if the
  ///     closure does not call scale(), or makes no gradient.
  /// @throws c10::ValueError for an empty closure, and as unscale_().
  at::Tensor pass_(torch::optim::Optimizer& optimizer,
                   const torch::optim::Optimizer::LossClosure& closure);

  /// Returns tensor / scale, for gradients of a scaled loss that the program computes with, such as
  /// those of a penalty. Differentiable; of 16-bit tensors the result is fp32. Notes no overflow.
  /// @throws c10::Error before scale(). c10::ValueError for a tensor of another kind of dtype.
  at::Tensor unscale(const at::Tensor& tensor) const;
  /// Scales several tensors, which may live on several devices.
  std::vector<at::Tensor> unscale(const std::vector<at::Tensor>& tensors) const;

  /// Checks the gradients and steps unless one is inf or NaN.
  ///
  /// Whether the parameters were stepped is what step_was_skipped() says, for every optimizer.
  /// What this returns does not say it: a fused optimizer is called at a skipped step too.
  ///
  /// An optim::AmpStepOptimizer, such as those of fastamp::optim, checks them in a pass that writes
  /// nothing; its step(), which is called in any case, then unscales, clips and updates in one
  /// more, or skips on the device. A fused one (optim::fuse_) is stepped likewise by
  /// optim::fused_step(). Any other is unscaled, unless that was done, and its step() called if
  /// every gradient is finite. Gradients are left unscaled and clipped.
  /// @param optimizer  Whose parameters are stepped; once in an iteration.
  /// @param closure  Must be empty unless the scaler is disabled.
  /// @returns What optimizer.step() returned; nullopt if it was not CALLED. An AmpStepOptimizer or
  ///     fused one returns a value always, skipped or not, on any device.
  /// @throws c10::Error before scale(), if called twice in one iteration, with a closure, or if no
  ///     parameter has a gradient (with an agreement a rank without gradients takes part). After
  ///     unscale_() and another scale(), if all gradients are others than those unscaled: an
  ///     iteration was broken off, and update() ends it.
  /// @throws c10::ValueError for fp16 gradients, unless they are those of an AmpStepOptimizer that
  ///     was not unscaled before.
  /// @note Waits once per device that holds gradients, unless the optimizer is an AmpStepOptimizer
  ///     or fused.
  std::optional<at::Tensor> step(torch::optim::Optimizer& optimizer,
                                 const torch::optim::Optimizer::LossClosure& closure = nullptr);

  /// Clips the gradients of an optimizer by the norm of all of them, after unscaling.
  ///
  /// For AmpStepOptimizers and fused ones the factor is applied within step(): until then gradients
  /// are as they were. For others they are unscaled, if they are not yet, and clipped at once. The
  /// 2-norm comes from the pass that checks the gradients.
  /// @param optimizer  Whose gradients are clipped.
  /// @param max_norm   Largest norm that is left.
  /// @param norm_type  Order of the norm; may be infinite. Orders but 2 cost a pass of their own.
  /// @param error_if_nonfinite  Refuse a norm that is inf or NaN; waits for the device.
  /// @returns the norm before clipping, a scalar tensor; 0 if there are no gradients.
  /// @throws c10::Error before scale(), after step(), or for a norm that is not finite, if asked
  ///     to. Gradients are not clipped then.
  at::Tensor clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                             double norm_type = 2.0, bool error_if_nonfinite = false);
  /// Brings every element of the gradients within [-clip_value, clip_value], after unscaling and
  /// after a clip_grad_norm_() that came before. When it happens is as with that.
  /// @throws c10::Error before scale() or after step(); c10::ValueError if clip_value is negative.
  void clip_grad_value_(torch::optim::Optimizer& optimizer, double clip_value);

  /// Ends an iteration: lowers the scale if an overflow was seen, raises it when it is due.
  /// @throws c10::Error if no gradients were checked since the last update().
  void update();
  /// Sets the scale; the growth count goes on. It ends an iteration if an optimizer was unscaled or
  /// stepped since the last update(), with a row of the history, and is none otherwise.
  /// @throws c10::ValueError if new_scale is not finite or outside min_scale..max_scale.
  void update(double new_scale);
  /// Updates with a dense, real tensor of one element, of any number of dimensions, on a device of
  /// the scaler's kind.
  /// @throws c10::ValueError for any other tensor. Bounds are applied at the next update(), and
  ///     nothing checks that the value is finite: reading it would wait for the device.
  void update(const at::Tensor& new_scale);

  double get_scale() const;  ///< The scale; 1 when disabled. Waits for the device.
  /// The scale after the last update() whose result has arrived; at most a few iterations old, and
  /// exact on the CPU. Never waits. 1 when disabled.
  double get_scale_async();
  /// Whether the last iteration skipped the step of an optimizer. Complete after update(); waits
  /// only if the device has not come that far.
  bool step_was_skipped();
  /// Returns it of one optimizer; false for one that was never stepped.
  bool step_was_skipped_for(const torch::optim::Optimizer& optimizer);
  /// Reports which gradients were not finite at the last skipped iteration. Waits for the device.
  /// @param named_parameters  module->named_parameters(), where names come from.
  OverflowReport overflow_report(
      const torch::OrderedDict<std::string, at::Tensor>& named_parameters =
          torch::OrderedDict<std::string, at::Tensor>());
  /// Reports how many gradient elements were 0, of the optimizers whose gradients were counted
  /// last: at iterations 0, 1, 2, 4 and so on up to 1024, and then each 1024th. Waits for the
  /// device. Not counted: float64 and sparse gradients, and what a GraphedStep replays.
  /// @param named_parameters  As for overflow_report().
  UnderflowReport underflow_report(
      const torch::OrderedDict<std::string, at::Tensor>& named_parameters =
          torch::OrderedDict<std::string, at::Tensor>());
  /// The last iterations, oldest first. Waits for the device.
  std::vector<StepRecord> history() const;

  /// Calls a function for each skipped step of an optimizer, of iterations that end from now on.
  ///
  /// It is called when the skip is known, on the thread that uses the scaler: on the CPU by the
  /// update() that ends the iteration; on CUDA by the first update(), get_scale_async() or other
  /// question to the scaler that finds the answer there, usually the next update(). Nothing waits
  /// for it. If one iteration skips the steps of several optimizers, it is called for each. It may
  /// use the scaler, but not destroy it. What it throws comes out of the call on the scaler, whose
  /// work is done by then; callbacks registered after it do not hear of that step.
  /// @param callback  Gets what is known of the step; see SkipCallback.
  /// @param wait  Make update() wait for the device, so that it is called before that returns.
  /// @throws c10::ValueError if the callback is empty.
  SkipHandle register_on_skip(SkipCallback callback, bool wait = false);

  double get_growth_factor() const;
  double get_backoff_factor() const;
  int64_t get_growth_interval() const;
  /// The setters act at the next update().
  /// @throws c10::ValueError for what the constructor refuses.
  void set_growth_factor(double growth_factor);
  void set_backoff_factor(double backoff_factor);
  void set_growth_interval(int64_t growth_interval);
  bool is_enabled() const;

  /// Returns what to store in a checkpoint, best after update(); nullopt when disabled. Waits for
  /// the device.
  std::optional<GradScalerState> state() const;
  /// Continues from a state; does nothing when disabled. Options that the state does not name
  /// keep their values. Of a history that is longer than history_size the last rows are kept.
  /// @throws c10::Error if the state is empty; c10::ValueError if an option in it is one that the
  ///     constructor refuses, a count is negative or does not fit in 32 bits, the scale is not
  ///     finite or the steps of its history are not consecutive.
  void load_state(const std::optional<GradScalerState>& state);

  /// Stores state() in an archive, for torch::save; a disabled scaler stores only that it is.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Reads what save() stored, for torch::load.
  /// @throws c10::Error if the archive was not written by save(), or by a disabled scaler.
  void load(torch::serialize::InputArchive& archive);

 private:
  friend class GraphedStep;
  friend class StepLog;
  struct Impl;
  // For a GraphedStep, which goes on with the scaler wherever that is moved to.
  explicit GradScaler(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  void expect_not_moved_from(const char* function) const;

  std::shared_ptr<Impl> impl_;  ///< Null: moved from.
};

FASTAMP_API torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                        const GradScaler& scaler);
FASTAMP_API torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                       GradScaler& scaler);

}  // namespace fastamp
