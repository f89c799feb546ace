// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

namespace fastamp::scaler {

/// The entries of a JSON object without objects or lists in it, each of which is taken once.
/// Everything that is not as asked for is a c10::ValueError that begins with "from_json: ".
class JsonObject {
 public:
  /// Reads all of a text.
  explicit JsonObject(std::string_view text);

  double number(const std::string& key);
  int64_t integer(const std::string& key);
  bool boolean(const std::string& key);
  std::string string(const std::string& key);

  /// Empty if there is no such key.
  std::optional<double> number_if(const std::string& key);
  std::optional<int64_t> integer_if(const std::string& key);

  /// Takes a null. @returns Whether it was one.
  bool null(const std::string& key);

  /// Refuses keys that nobody took.
  void expect_empty() const;

  /// A number as it is written: what it is read as depends on its key.
  struct Number {
    std::string token;
  };
  using Value = std::variant<std::monostate, bool, Number, std::string>;  ///< The first is null.

 private:
  template <typename T>
  T take(const std::string& key, const char* kind);

  std::map<std::string, Value> entries_;
};

}  // namespace fastamp::scaler
