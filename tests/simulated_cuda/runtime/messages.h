// SPDX-License-Identifier: Apache-2.0
#pragma once

// Messages between ranks, in one process or several of one machine: a file for each.
//
// Stands for: that a message arrives once, as it was when it was sent. Does not stand for:
// networks, speed. Who waits five minutes for a message ends the process.

#include <atomic>
#include <string>
#include <vector>

namespace simulated_cuda {

using Message = std::vector<char>;

/// Makes a folder that no other communicator has; returns its path.
std::string make_mail_folder();

/// What one rank sends to others and receives from them, by tags that both agree on.
class Mailbox {
 public:
  Mailbox(std::string folder, int rank);
  ~Mailbox() { close(); }
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  void send(const std::string& tag, int to, const Message& message) const;
  /// Waits for a message and takes it; returns an empty one when the mailbox is closed.
  Message receive(const std::string& tag, int from) const;
  /// Ends all waits, from any thread; removes the folder if no message is left in it.
  void close();

  const std::string& folder() const { return folder_; }

 private:
  std::string path_of(const std::string& tag, int from, int to) const;

  std::string folder_;
  int rank_;
  std::atomic<bool> closed_{false};
};

}  // namespace simulated_cuda
