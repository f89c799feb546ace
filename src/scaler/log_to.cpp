// SPDX-License-Identifier: Apache-2.0
#include "core/text.h"
#include "scaler/grad_scaler_impl.h"
#include "scaler/step_guard_impl.h"
#include "scaler/step_logger.h"

#include <fastamp/autocast/registration.h>
#include <fastamp/scaler/log_to.h>

#include <c10/util/Exception.h>

#include <exception>
#include <memory>
#include <ostream>
#include <utility>

namespace fastamp {
namespace {

std::shared_ptr<scaler::StepLogger> attach(scaler::ScalerCore& core, LogCallback callback,
                                           bool casts) {
  TORCH_CHECK_VALUE(callback, "log_to: expected a callback, got an empty function");
  if (casts) {
    register_kernels();
  }
  // The logger is its own end's subject: known to it once it is made.
  const auto self = std::make_shared<std::weak_ptr<scaler::StepLogger>>();
  auto careful = [callback = std::move(callback), self](const LoggedStep& row) {
    try {
      callback(row);
    } catch (const std::exception& error) {
      TORCH_WARN("log_to: the callback threw at step ", row.step, " (", error.what(),
                 "). Nothing more is logged.");
      if (const auto logger = self->lock()) {
        logger->drop();
      }
    }
  };
  auto logger = std::make_shared<scaler::StepLogger>(std::move(careful), casts);
  *self = logger;
  core.log_to(logger);
  return logger;
}

}  // namespace

StepLog::StepLog(StepLog&&) noexcept = default;

StepLog::~StepLog() {
  try {
    release();
    // NOLINTNEXTLINE(bugprone-empty-catch): a destructor throws nothing
  } catch (...) {
  }
}

StepLog& StepLog::operator=(StepLog&& other) noexcept {
  StepLog ended(std::move(other));
  std::swap(logger_, ended.logger_);
  return *this;
}

void StepLog::flush() {
  if (logger_ != nullptr) {
    logger_->pass_on(/*wait=*/true);
  }
}

void StepLog::release() {
  if (logger_ != nullptr) {
    logger_->release();
  }
}

StepLog::StepLog(GradScaler& scaler, LogCallback callback, bool casts) {
  scaler.expect_not_moved_from("log_to");
  logger_ = attach(scaler.impl_->core, std::move(callback), casts);
}

StepLog::StepLog(StepGuard& guard, LogCallback callback, bool casts)
    : logger_(attach(guard.impl_->core, std::move(callback), casts)) {}

StepLog log_to(GradScaler& scaler, LogCallback callback, bool casts) {
  return {scaler, std::move(callback), casts};
}

StepLog log_to(StepGuard& guard, LogCallback callback, bool casts) {
  return {guard, std::move(callback), casts};
}

std::ostream& operator<<(std::ostream& out, const LoggedStep& row) {
  auto text = new_text();
  text << static_cast<const StepRecord&>(row) << ", overflows " << row.overflows;
  if (row.underflows) {
    text << ", underflows " << *row.underflows;
  }
  text << ", casts " << row.casts.casts() << " (" << row.casts.cast_bytes << " bytes)";
  return out << text.str();
}

}  // namespace fastamp
