// SPDX-License-Identifier: Apache-2.0
#include "digits_table.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <iostream>

namespace digits {

namespace {

std::size_t terminal_width() {
  const char* columns = std::getenv("COLUMNS");
  if (const auto wanted = columns == nullptr ? 0 : std::strtoul(columns, nullptr, 10); wanted > 0) {
    return wanted;
  }
  winsize size{};
  const bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 100;
}

std::string padded(const std::string& text, std::size_t size, bool left) {
  const std::string blanks(size - text.size(), ' ');
  return left ? text + blanks : blanks + text;
}

// Columns [first, last) of every row, after the first column.
void print_block(const Table& rows, const std::vector<std::size_t>& sizes, std::size_t first,
                 std::size_t last) {
  std::cout << '\n' << padded(rows[0][0].first, sizes[0], true);
  for (auto column = first; column < last; ++column) {
    std::cout << "  " << padded(rows[0][column].first, sizes[column], false);
  }
  for (const auto& row : rows) {
    std::cout << '\n' << padded(row[0].second, sizes[0], true);
    for (auto column = first; column < last; ++column) {
      std::cout << "  " << padded(row[column].second, sizes[column], false);
    }
  }
  std::cout << '\n';
}

}  // namespace

void print_table(const Table& rows) {
  std::vector<std::size_t> sizes;
  for (std::size_t column = 0; column < rows.at(0).size(); ++column) {
    sizes.push_back(rows[0][column].first.size());
    for (const auto& row : rows) {
      sizes.back() = std::max(sizes.back(), row[column].second.size());
    }
  }
  const auto width = terminal_width();
  std::size_t first = 1;
  while (first < sizes.size()) {
    auto last = first;
    auto used = sizes[0];
    while (last < sizes.size() && (last == first || used + 2 + sizes[last] <= width)) {
      used += 2 + sizes[last++];
    }
    print_block(rows, sizes, first, last);
    first = last;
  }
  std::cout << '\n' << std::flush;
}

std::string format(const char* pattern, double number) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), pattern, number);
  return text.data();
}

std::string short_number(std::int64_t number) {
  return number >= 10000 && number % 1000 == 0 ? std::to_string(number / 1000) + "k"
                                               : std::to_string(number);
}

}  // namespace digits
