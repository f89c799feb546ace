// SPDX-License-Identifier: Apache-2.0
#include "faults/every_allocation.h"

#include "faults/failing_memory.h"
#include "support/autocast_state.h"
#include "support/catch.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>

namespace fastamp::test {
namespace {

/// What a call that fails may leave behind.
struct Whole {
  Seen expected;              ///< After a call in which nothing fails.
  std::vector<Seen> halfway;  ///< After a part of it.
};

/// How a call went in which allocations failed.
struct Outcome {
  bool is_over = false;  ///< There were not so many allocations.
  bool torch_ended = false;
  std::string problem;  ///< "" for none.
};

/// Calls with those allocations failing that come after `before` others.
Outcome call_without(const MakeSubject& make, const Whole& whole, int before, Fails fails) {
  const auto state = public_state();
  const auto subject = make();
  const auto found = subject.look();
  bool failed = false;
  Outcome outcome;
  {
    const FailingMemory failing(before, fails);
    try {
      subject.call();
    } catch (const std::exception&) {
      failed = true;
    }
    outcome.is_over = !FailingMemory::happened();
  }
  if (public_state() != state) {
    outcome.problem = "a region was left open";
    return outcome;
  }
  try {
    if (failed) {
      const auto left = subject.look();
      const auto is_whole = [&](const Seen& part) { return part.difference(left).empty(); };
      if (std::ranges::none_of(whole.halfway, is_whole)) {
        outcome.problem = found.difference(left);
      }
      subject.call();
    }
    if (const auto difference = whole.expected.difference(subject.look()); !difference.empty()) {
      outcome.problem += (failed ? " after the next call: " : " without an error: ") + difference;
    }
  } catch (const std::exception& error) {
    outcome.problem += std::string(" and then ") + error.what();
  }
  return outcome;
}

constexpr int kTorchEnded = 77;

constexpr int kArchiveStride = 8;

/// Whether torch's code for archives is at work, in which nothing may throw.
bool is_torchs_end() {
  std::array<void*, 64> frames{};
  const int count = backtrace(frames.data(), static_cast<int>(frames.size()));
  return std::any_of(frames.begin(), frames.begin() + count, [](void* frame) {
    Dl_info info{};
    if (dladdr(frame, &info) == 0 || info.dli_sname == nullptr) {
      return false;
    }
    const std::string_view name(info.dli_sname);
    return name.find("InputArchive") != std::string_view::npos ||
           name.find("5torch3jit") != std::string_view::npos;
  });
}

/// The same in a process of its own.
Outcome call_in_child(const MakeSubject& make, const Whole& whole, int before, Fails fails) {
  std::array<int, 2> channel{};
  REQUIRE(pipe(channel.data()) == 0);
  const auto child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    std::set_terminate([] { _exit(is_torchs_end() ? kTorchEnded : EXIT_FAILURE); });
    const auto outcome = call_without(make, whole, before, fails);
    static_cast<void>(write(channel[1], outcome.problem.data(), outcome.problem.size()));
    _exit(outcome.is_over ? 2 : 0);
  }
  close(channel[1]);
  Outcome outcome;
  std::array<char, 4096> text{};
  for (ssize_t size = 0; (size = read(channel[0], text.data(), text.size())) > 0;) {
    outcome.problem.append(text.data(), static_cast<std::size_t>(size));
  }
  close(channel[0]);
  int status = 0;
  waitpid(child, &status, 0);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_FAILURE;
  outcome.is_over = code == 2;
  outcome.torch_ended = code == kTorchEnded;
  if (code == EXIT_FAILURE) {
    outcome.problem = "the process ended";
  }
  return outcome;
}

}  // namespace

Seen& Seen::add(const at::Tensor& tensor) {
  tensors.push_back(tensor.defined() ? tensor.detach().clone() : tensor);
  return *this;
}

Seen& Seen::add(const std::string& line) {
  text += line + "\n";
  return *this;
}

std::string Seen::difference(const Seen& other) const {
  if (text != other.text) {
    return text + " became " + other.text;
  }
  if (tensors.size() != other.tensors.size()) {
    return "number of tensors";
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& a = tensors[i];
    const auto& b = other.tensors[i];
    if (a.defined() != b.defined() || (a.defined() && !bit_equal(a, b))) {
      return "tensor " + std::to_string(i);
    }
  }
  return "";
}

int fail_every_allocation(const MakeSubject& make, const std::vector<MakeSubject>& halfway,
                          TorchEnds torch_ends) {
  const auto first = make();
  first.call();  // Also what is made once in a process.
  const auto again = make();
  again.call();
  Whole whole{.expected = again.look(), .halfway = {}};
  for (const auto& part : halfway) {
    const auto subject = part();
    subject.call();
    whole.halfway.push_back(subject.look());
  }
  const bool in_archives = torch_ends == TorchEnds::kInArchives;
  const int stride = in_archives ? std::max(1, kArchiveStride / rounds()) : 1;
  int count = 0;
  for (const auto fails : {Fails::kOne, Fails::kAllFrom}) {
    if (fails == Fails::kAllFrom && torch_ends == TorchEnds::kWithGraphs) {
      break;
    }
    count = 0;
    Outcome outcome;
    for (int before = 0; !outcome.is_over; before += stride) {
      outcome = in_archives ? call_in_child(make, whole, before, fails)
                            : call_without(make, whole, before, fails);
      CAPTURE(before, fails == Fails::kOne);
      CHECK(outcome.problem == "");
      count += outcome.is_over || outcome.torch_ended ? 0 : 1;
    }
  }
  return count;
}

int rounds() {
  const char* const seeds = std::getenv("SEEDS");
  return seeds == nullptr ? 1 : std::max(1, std::atoi(seeds));
}

}  // namespace fastamp::test
