// SPDX-License-Identifier: Apache-2.0
#include "simulated_cuda/runtime/messages.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <thread>
#include <utility>

namespace simulated_cuda {

namespace fs = std::filesystem;

namespace {

/// Removes at the end of the process what it has made: torch keeps communicators for good.
struct Folders {
  std::vector<fs::path> made;
  ~Folders() {
    std::error_code not_empty;
    for (const fs::path& folder : made) fs::remove(folder, not_empty);
  }
};

}  // namespace

std::string make_mail_folder() {
  static Folders folders;
  std::string path = (fs::temp_directory_path() / "simulated-nccl-XXXXXX").string();
  if (mkdtemp(path.data()) == nullptr) {
    std::fprintf(stderr, "simulated CUDA: no folder %s for messages of ranks\n", path.c_str());
    std::abort();
  }
  folders.made.emplace_back(path);
  return path;
}

Mailbox::Mailbox(std::string folder, int rank) : folder_(std::move(folder)), rank_(rank) {
  std::error_code exists;
  fs::create_directory(folder_, exists);
}

void Mailbox::close() {
  closed_ = true;
  std::error_code not_empty;
  fs::remove(folder_, not_empty);
}

std::string Mailbox::path_of(const std::string& tag, int from, int to) const {
  return folder_ + "/" + tag + "." + std::to_string(from) + "." + std::to_string(to);
}

void Mailbox::send(const std::string& tag, int to, const Message& message) const {
  const std::string path = path_of(tag, rank_, to);
  const std::string unfinished = path + ".unfinished";
  std::ofstream(unfinished, std::ios::binary)
      .write(message.data(), static_cast<std::streamsize>(message.size()));
  fs::rename(unfinished, path);
}

Message Mailbox::receive(const std::string& tag, int from) const {
  using Clock = std::chrono::steady_clock;
  constexpr auto kPatience = std::chrono::minutes(5);
  constexpr auto kPause = std::chrono::microseconds(100);
  const std::string path = path_of(tag, from, rank_);
  for (const auto start = Clock::now(); !fs::exists(path); std::this_thread::sleep_for(kPause)) {
    if (closed_) return {};
    if (Clock::now() - start > kPatience) {
      std::fprintf(stderr, "simulated CUDA: rank %d waits in vain for rank %d (%s)\n", rank_, from,
                   tag.c_str());
      std::abort();
    }
  }
  std::ifstream file(path, std::ios::binary);
  Message message{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  fs::remove(path);
  return message;
}

}  // namespace simulated_cuda
