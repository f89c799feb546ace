// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace fastamp::test {

/// Collects torch's warnings of the calling thread instead of printing them, all of them: also
/// those that torch gives once per process, if it has not given them yet.
class CapturedWarnings : private c10::WarningHandler {
 public:
  CapturedWarnings() : guard_(this) {}
  ~CapturedWarnings() override = default;
  CapturedWarnings(const CapturedWarnings&) = delete;
  CapturedWarnings& operator=(const CapturedWarnings&) = delete;

  const std::vector<std::string>& texts() const { return texts_; }

  bool has(const std::string& part) const {
    for (const auto& text : texts_) {
      if (text.find(part) != std::string::npos) {
        return true;
      }
    }
    return false;
  }

 private:
  void process(const c10::Warning& warning) override { texts_.push_back(warning.msg()); }

  std::vector<std::string> texts_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

/// The text of the exception of type Error that `function` throws; "" if it throws none.
template <class Error, class Function>
std::string error_text(Function&& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

}  // namespace fastamp::test
