// SPDX-License-Identifier: Apache-2.0
#include "scaler/json_object.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <system_error>
#include <utility>

namespace fastamp::scaler {
namespace {

using Number = JsonObject::Number;
using Value = JsonObject::Value;

template <typename... Got>
[[noreturn]] void refuse_json(const std::string& expected, const Got&... got) {
  TORCH_CHECK_VALUE(false, "from_json: expected ", expected, ", got ", got...);
}

/// Reads one JSON object without objects or lists in it.
class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  std::map<std::string, Value> object() {
    std::map<std::string, Value> entries;
    expect('{');
    if (next() == '}') {
      expect('}');
    } else {
      do {
        auto key = string();
        expect(':');
        auto entry = value();
        if (!entries.emplace(key, std::move(entry)).second) {
          refuse_json("each key once", '"', key, "\" twice");
        }
      } while (accept(','));
      expect('}');
    }
    if (next() != '\0') {
      refuse_json("nothing after the object", found());
    }
    return entries;
  }

 private:
  /// The next character that is not a space; 0 at the end.
  char next() {
    at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size());
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  std::string found() {
    return next() == '\0' ? "the end of the text"
                          : '\'' + std::string(1, next()) + "' at character " + std::to_string(at_);
  }

  bool accept(char wanted) {
    const bool accepted = next() == wanted && at_ < text_.size();
    at_ += accepted ? 1 : 0;
    return accepted;
  }

  void expect(char wanted) {
    if (!accept(wanted)) {
      refuse_json("JSON with '" + std::string(1, wanted) + "' here", found());
    }
  }

  std::string string() {
    if (!accept('"')) {
      refuse_json("JSON with a string here", found());
    }
    const auto end = text_.find_first_of("\"\\", at_);
    if (end == std::string_view::npos || text_[end] == '\\') {
      refuse_json("a string that ends and has no escapes", "one at character ", at_ - 1);
    }
    const auto content = text_.substr(at_, end - at_);
    at_ = end + 1;
    return std::string(content);
  }

  Value value() {
    if (next() == '"') {
      return string();
    }
    const auto end = text_.find_first_not_of(
        "+-.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz", at_);
    const auto token = text_.substr(at_, end == std::string_view::npos ? end : end - at_);
    if (token.empty()) {
      refuse_json("a number, a string, true, false or null", found());
    }
    if (token != "null" && token != "true" && token != "false" && !is_number(token)) {
      refuse_json("a number, a string, true, false or null", token, " at character ", at_);
    }
    at_ += token.size();
    if (token == "null") {
      return {};
    }
    if (token == "true" || token == "false") {
      return token == "true";
    }
    return Number{std::string(token)};
  }

  /// JSON's grammar: std::from_chars takes more.
  static bool is_number(std::string_view token) {
    const auto digits = [&token] {
      const auto count = std::min(token.find_first_not_of("0123456789"), token.size());
      token.remove_prefix(count);
      return count;
    };
    const auto skip = [&token](std::string_view any) {
      const bool there = !token.empty() && any.find(token.front()) != std::string_view::npos;
      token.remove_prefix(there ? 1 : 0);
      return there;
    };
    skip("-");
    const bool leading_zero = !token.empty() && token.front() == '0';
    const auto whole = digits();
    if (whole == 0 || (leading_zero && whole > 1)) {
      return false;
    }
    if (skip(".") && digits() == 0) {
      return false;
    }
    if (skip("eE")) {
      skip("+-");
      if (digits() == 0) {
        return false;
      }
    }
    return token.empty();
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

std::string json_kind_of(const Value& value) {
  static constexpr std::array kKinds{"null", "a bool", "a number", "a string"};
  return kKinds.at(value.index());
}

}  // namespace

JsonObject::JsonObject(std::string_view text) : entries_(JsonReader(text).object()) {}

template <typename T>
T JsonObject::take(const std::string& key, const char* kind) {
  const auto found = entries_.find(key);
  if (found == entries_.end()) {
    refuse_json("an object with \"" + key + '"', "one without it");
  }
  auto* const value = std::get_if<T>(&found->second);
  if (value == nullptr) {
    refuse_json('"' + key + "\" to be " + kind, json_kind_of(found->second));
  }
  auto taken = std::move(*value);
  entries_.erase(found);
  return taken;
}

double JsonObject::number(const std::string& key) {
  const auto token = take<Number>(key, "a number").token;
  double value = 0.0;
  const auto read = std::from_chars(token.data(), token.data() + token.size(), value);
  if (read.ec != std::errc()) {
    refuse_json('"' + key + "\" in the range of float64", token);
  }
  return value;
}

int64_t JsonObject::integer(const std::string& key) {
  const auto token = take<Number>(key, "an integer").token;
  int64_t value = 0;
  const auto* const end = token.data() + token.size();
  const auto read = std::from_chars(token.data(), end, value);
  if (read.ec != std::errc() || read.ptr != end) {
    refuse_json('"' + key + "\" to be an integer of 64 bits", token);
  }
  return value;
}

bool JsonObject::boolean(const std::string& key) { return take<bool>(key, "a bool"); }

std::string JsonObject::string(const std::string& key) {
  return take<std::string>(key, "a string");
}

std::optional<double> JsonObject::number_if(const std::string& key) {
  return entries_.contains(key) ? std::optional(number(key)) : std::nullopt;
}

std::optional<int64_t> JsonObject::integer_if(const std::string& key) {
  return entries_.contains(key) ? std::optional(integer(key)) : std::nullopt;
}

bool JsonObject::null(const std::string& key) {
  const auto found = entries_.find(key);
  const bool is_null =
      found != entries_.end() && std::holds_alternative<std::monostate>(found->second);
  if (is_null) {
    entries_.erase(found);
  }
  return is_null;
}

void JsonObject::expect_empty() const {
  if (!entries_.empty()) {
    refuse_json("no other key", '"', entries_.begin()->first, '"');
  }
}

}  // namespace fastamp::scaler
