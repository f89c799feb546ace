// SPDX-License-Identifier: Apache-2.0
//
// NCCL: collectives and messages between simulated devices of one process, or of several processes
// of one machine.
//
// Stands for: the order on the stream that a call is for, groups of calls, graphs, splits; results
// in the dtype of the tensors, added in the order of ranks; refusals of another device's memory and
// streams. Does not stand for: speed, algorithms and their order of sums, calls that do not block.
// A rank that waits for others does so in the call, or in late mode when its stream comes to it.
// The types are those of NCCL as callers pass them: enumerations are ints.
#include "simulated_cuda/runtime/calls.h"
#include "simulated_cuda/runtime/launch.h"
#include "simulated_cuda/runtime/memory.h"
#include "simulated_cuda/runtime/messages.h"
#include "simulated_cuda/runtime/streams.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace simulated_cuda {
namespace {

enum Result : int { kSuccess = 0, kInvalidArgument = 4, kInvalidUsage = 5 };
enum Reduction : int { kConcatenate = -1, kAverage = 4 };

struct UniqueId {
  char folder[128];
};

struct Communicator {
  Communicator(const std::string& folder, int rank_, int ranks_)
      : mail(folder, rank_), rank(rank_), ranks(ranks_), device(thread_state().device) {}

  Mailbox mail;
  int rank;
  int ranks;
  int device;
  unsigned splits = 0;
  std::map<std::string, std::uint64_t> numbers;  ///< Of the last message, by its kind.
};

using Reduce = void (*)(int dtype, int reduction, const char* const* parts, std::size_t ranks,
                        std::size_t elements, void* to);

std::size_t bytes_of(int dtype) {
  constexpr std::size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return kBytes[static_cast<std::size_t>(dtype)];
}

bool is_dtype(int dtype) { return dtype >= 0 && dtype < 12; }

struct Part {
  int to;
  const char* memory;
};

/// One call: what a rank sends, whose messages it waits for, and what becomes of them.
struct Transfer {
  Communicator* communicator;
  std::string kind;  ///< Who exchanges what with whom: such transfers are numbered.
  std::vector<Part> sent;
  std::size_t bytes;  ///< Of each message.
  std::vector<int> received;
  void* to;
  int reduction = kConcatenate;
  int dtype = 0;

  Stream* stream = nullptr;
  std::string tag{};  ///< While it is under way.
  bool started = false;

  void number() { tag = kind + std::to_string(++communicator->numbers[kind]); }
  void start();
  void finish() const;
};

void Transfer::start() {
  for (const Part& part : sent) {
    const auto* const begin = static_cast<const char*>(host_view(part.memory));
    communicator->mail.send(tag, part.to, Message(begin, begin + bytes));
  }
  started = true;
}

void Transfer::finish() const {
  std::vector<Message> messages;
  for (const int from : received) {
    messages.push_back(communicator->mail.receive(tag, from));
    if (messages.back().size() != bytes) {
      std::fprintf(stderr, "simulated CUDA: rank %d expects %zu bytes of rank %d, got %zu\n",
                   communicator->rank, bytes, from, messages.back().size());
      return;
    }
  }
  auto* const memory = static_cast<char*>(host_view(to));
  if (reduction == kConcatenate) {
    for (std::size_t i = 0; i < messages.size(); ++i) {
      std::memcpy(memory + i * bytes, messages[i].data(), bytes);
    }
    return;
  }
  static const auto reduce = reinterpret_cast<Reduce>(
      find_beside("libsimulated_cuda_redirect.so", "simulated_cuda_reduce"));
  std::vector<const char*> parts;
  for (const Message& message : messages) parts.push_back(message.data());
  if (!parts.empty() && reduce != nullptr) {
    reduce(dtype, reduction, parts.data(), parts.size(), bytes / bytes_of(dtype), memory);
  }
}

/// Calls of a thread between ncclGroupStart and ncclGroupEnd.
struct Group {
  int depth = 0;
  std::vector<std::shared_ptr<Transfer>> transfers;
};
Group& group() {
  thread_local Group state;
  return state;
}

/// Puts transfers on their streams: none waits for others' messages before all have sent theirs.
void submit(const std::vector<std::shared_ptr<Transfer>>& transfers) {
  for (const auto& one : transfers) {
    // A graph's transfers are numbered by their replays.
    const bool captured = one->stream->capture != nullptr;
    if (captured) {
      one->kind = "graph-" + one->kind;
    } else {
      one->number();
    }
    const auto work = [one, captured] {
      if (captured) one->number();
      one->start();
    };
    submit(*one->stream, work, one->kind.c_str(), Reach::kHost);
  }
  for (const auto& one : transfers) {
    const auto work = [one, transfers] {
      for (const auto& other : transfers) {
        while (!other->started && !other->stream->queue.empty()) run_one(*other->stream);
      }
      one->finish();
    };
    submit(*one->stream, work, one->kind.c_str(), Reach::kHost);
  }
}

int refuse_call(const char* problem) {
  std::fprintf(stderr, "simulated CUDA: NCCL: %s\n", problem);
  return kInvalidUsage;
}

bool is_of(const void* memory, const Communicator& communicator) {
  return memory == nullptr || device_of(memory) == communicator.device;
}

int add(Transfer transfer, cudaStream_t handle) {
  const std::scoped_lock lock(state_mutex());
  const Communicator& own = *transfer.communicator;
  transfer.stream = find_stream(handle);
  if (transfer.stream == nullptr || transfer.stream->device != own.device) {
    return refuse_call("a stream of another device than the communicator's");
  }
  const bool sends_own =
      std::ranges::all_of(transfer.sent, [&](const Part& part) { return is_of(part.memory, own); });
  if (transfer.bytes != 0 &&
      (!sends_own || !is_of(transfer.received.empty() ? nullptr : transfer.to, own))) {
    return refuse_call("memory of another device than the communicator's");
  }
  count(Count::collectives);
  const auto shared = std::make_shared<Transfer>(std::move(transfer));
  if (group().depth > 0) {
    group().transfers.push_back(shared);
  } else {
    submit({shared});
  }
  return kSuccess;
}

std::vector<int> all_ranks(const Communicator& communicator) {
  std::vector<int> ranks(static_cast<std::size_t>(communicator.ranks));
  for (int rank = 0; rank < communicator.ranks; ++rank)
    ranks[static_cast<std::size_t>(rank)] = rank;
  return ranks;
}

/// The same memory for each rank, or, with a stride in bytes, a slice for each.
std::vector<Part> to_all(const Communicator& communicator, const void* memory, std::size_t stride) {
  std::vector<Part> parts;
  for (const int rank : all_ranks(communicator)) {
    parts.push_back(
        {rank, static_cast<const char*>(memory) + static_cast<std::size_t>(rank) * stride});
  }
  return parts;
}

Communicator* make_communicator(const std::string& folder, int rank, int ranks) {
  const std::scoped_lock lock(state_mutex());
  return new Communicator(folder, rank, ranks);
}

}  // namespace

/// Of refused.cpp.
int refuse_nccl(const char* function) {
  return refuse_call((std::string(function) + " is not simulated").c_str());
}

}  // namespace simulated_cuda

using namespace simulated_cuda;

extern "C" {

int ncclGetVersion(int* version) {
  *version = 22809;
  return kSuccess;
}
const char* ncclGetErrorString(int result) {
  return result == kSuccess ? "no error" : "an error of the simulated NCCL";
}
const char* ncclGetLastError(Communicator* /*communicator*/) { return ""; }

int ncclGetUniqueId(UniqueId* id) {
  std::snprintf(id->folder, sizeof(id->folder), "%s", make_mail_folder().c_str());
  return kSuccess;
}

int ncclCommInitRankConfig(Communicator** to, int ranks, UniqueId id, int rank, void* /*config*/) {
  if (rank < 0 || rank >= ranks) return kInvalidArgument;
  *to = make_communicator(id.folder, rank, ranks);
  return kSuccess;
}
int ncclCommInitRank(Communicator** to, int ranks, UniqueId id, int rank) {
  return ncclCommInitRankConfig(to, ranks, id, rank, nullptr);
}
int ncclCommInitRankScalable(Communicator** to, int ranks, int rank, int /*ids*/, UniqueId* ids,
                             void* config) {
  return ncclCommInitRankConfig(to, ranks, ids[0], rank, config);
}
int ncclCommInitAll(Communicator** to, int ranks, const int* devices) {
  const std::string folder = make_mail_folder();
  for (int rank = 0; rank < ranks; ++rank) {
    to[rank] = make_communicator(folder, rank, ranks);
    to[rank]->device = devices == nullptr ? rank : devices[rank];
  }
  return kSuccess;
}

int ncclCommSplit(Communicator* parent, int color, int key, Communicator** to, void* /*config*/) {
  struct Choice {
    int color;
    int key;
    int rank;
  };
  const Choice own{color, key, parent->rank};
  const std::string number = std::to_string(++parent->splits);
  const auto* const bytes = reinterpret_cast<const char*>(&own);
  const std::vector<int> ranks = all_ranks(*parent);
  for (const int rank : ranks) {
    parent->mail.send("split" + number, rank, Message(bytes, bytes + sizeof(own)));
  }
  std::vector<Choice> members;
  for (const int rank : ranks) {
    Choice choice{};
    const Message message = parent->mail.receive("split" + number, rank);
    std::memcpy(&choice, message.data(), std::min(message.size(), sizeof(choice)));
    if (choice.color == color) members.push_back(choice);
  }
  *to = nullptr;
  if (color < 0) return kSuccess;
  std::ranges::stable_sort(members, {}, &Choice::key);
  const auto place = std::ranges::find(members, parent->rank, &Choice::rank) - members.begin();
  *to = make_communicator(parent->mail.folder() + "-" + number + "-" + std::to_string(color),
                          static_cast<int>(place), static_cast<int>(members.size()));
  (*to)->device = parent->device;
  return kSuccess;
}

int ncclCommFinalize(Communicator* /*communicator*/) { return kSuccess; }
int ncclCommDestroy(Communicator* communicator) {
  const std::scoped_lock lock(state_mutex());
  finish_all();  // what waits names it
  delete communicator;
  return kSuccess;
}
/// Of torch's watchdog, while another thread may wait: the communicator stays.
int ncclCommAbort(Communicator* communicator) {
  communicator->mail.close();
  return kSuccess;
}
int ncclCommGetAsyncError(Communicator* /*communicator*/, int* error) {
  *error = kSuccess;
  return kSuccess;
}
int ncclCommCount(const Communicator* communicator, int* ranks) {
  *ranks = communicator->ranks;
  return kSuccess;
}
int ncclCommUserRank(const Communicator* communicator, int* rank) {
  *rank = communicator->rank;
  return kSuccess;
}
int ncclCommCuDevice(const Communicator* communicator, int* device) {
  *device = communicator->device;
  return kSuccess;
}

int ncclGroupStart() {
  ++group().depth;
  return kSuccess;
}
int ncclGroupEnd() {
  if (--group().depth == 0) {
    const std::scoped_lock lock(state_mutex());
    submit(std::exchange(group().transfers, {}));
  }
  return kSuccess;
}

int ncclAllReduce(const void* from, void* to, std::size_t count, int dtype, int reduction,
                  Communicator* own, cudaStream_t stream) {
  if (!is_dtype(dtype) || reduction > kAverage) return refuse_call("a reduction not simulated");
  return add({own, "all-reduce", to_all(*own, from, 0), count * bytes_of(dtype), all_ranks(*own),
              to, reduction, dtype},
             stream);
}

int ncclReduce(const void* from, void* to, std::size_t count, int dtype, int reduction, int root,
               Communicator* own, cudaStream_t stream) {
  if (!is_dtype(dtype) || reduction > kAverage) return refuse_call("a reduction not simulated");
  const auto received = own->rank == root ? all_ranks(*own) : std::vector<int>{};
  return add({own,
              "reduce",
              {{root, static_cast<const char*>(from)}},
              count * bytes_of(dtype),
              received,
              to,
              reduction,
              dtype},
             stream);
}

int ncclReduceScatter(const void* from, void* to, std::size_t count, int dtype, int reduction,
                      Communicator* own, cudaStream_t stream) {
  if (!is_dtype(dtype) || reduction > kAverage) return refuse_call("a reduction not simulated");
  const std::size_t bytes = count * bytes_of(dtype);
  return add({own, "reduce-scatter", to_all(*own, from, bytes), bytes, all_ranks(*own), to,
              reduction, dtype},
             stream);
}

int ncclBroadcast(const void* from, void* to, std::size_t count, int dtype, int root,
                  Communicator* own, cudaStream_t stream) {
  if (!is_dtype(dtype)) return kInvalidArgument;
  const auto sent = own->rank == root ? to_all(*own, from, 0) : std::vector<Part>{};
  return add({own, "broadcast", sent, count * bytes_of(dtype), {root}, to}, stream);
}
int ncclBcast(void* memory, std::size_t count, int dtype, int root, Communicator* own,
              cudaStream_t stream) {
  return ncclBroadcast(memory, memory, count, dtype, root, own, stream);
}

int ncclAllGather(const void* from, void* to, std::size_t count, int dtype, Communicator* own,
                  cudaStream_t stream) {
  if (!is_dtype(dtype)) return kInvalidArgument;
  return add(
      {own, "all-gather", to_all(*own, from, 0), count * bytes_of(dtype), all_ranks(*own), to},
      stream);
}

int ncclAlltoAll(const void* from, void* to, std::size_t count, int dtype, Communicator* own,
                 cudaStream_t stream) {
  if (!is_dtype(dtype)) return kInvalidArgument;
  const std::size_t bytes = count * bytes_of(dtype);
  return add({own, "all-to-all", to_all(*own, from, bytes), bytes, all_ranks(*own), to}, stream);
}

int ncclSend(const void* from, std::size_t count, int dtype, int peer, Communicator* own,
             cudaStream_t stream) {
  if (!is_dtype(dtype)) return kInvalidArgument;
  const std::string kind = "from" + std::to_string(own->rank) + "to" + std::to_string(peer) + "-";
  return add(
      {own, kind, {{peer, static_cast<const char*>(from)}}, count * bytes_of(dtype), {}, nullptr},
      stream);
}

int ncclRecv(void* to, std::size_t count, int dtype, int peer, Communicator* own,
             cudaStream_t stream) {
  if (!is_dtype(dtype)) return kInvalidArgument;
  const std::string kind = "from" + std::to_string(peer) + "to" + std::to_string(own->rank) + "-";
  return add({own, kind, {}, count * bytes_of(dtype), {peer}, to}, stream);
}

}  // extern "C"
