// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace digits {

/// Rows of the same columns, each a name and a text.
using Table = std::vector<std::vector<std::pair<std::string, std::string>>>;

/// Prints a table; columns that do not fit the terminal go into further blocks below.
void print_table(const Table& rows);

/// One number as printf shows it.
std::string format(const char* pattern, double number);

/// 100k for 100000.
std::string short_number(std::int64_t number);

}  // namespace digits
