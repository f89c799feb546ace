// SPDX-License-Identifier: Apache-2.0
#pragma once

// The part of the CUDA runtime that our host code uses: streams, graphs, memory. One device.

#include "cuda_on_cpu/emulator/fibers.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

namespace emulator {

/// What launch plans ask about the device.
struct Device {
  int multiProcessorCount = 2;
  int maxThreadsPerMultiProcessor = 2048;
  int driverVersion = 12010;  ///< The first that takes 32 764 bytes of arguments.
};
Device& device();

/// What has been launched so far, of all streams.
struct Statistics {
  unsigned launches = 0;
  std::size_t most_argument_bytes = 0;
};
Statistics& statistics();

using Work = std::function<void()>;

/// A captured graph. Its memory is its own, and freed with it.
class Graph {
 public:
  Graph() = default;
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  std::vector<Work> nodes;
  std::vector<void*> memory;
};

/// Work in order. Streams are not ordered with each other, nor with the host until it waits.
class Stream {
 public:
  explicit Stream(std::int64_t id);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  std::int64_t id() const { return id_; }
  /// Runs the work: now, or when the stream is waited for if `late`; a captured one records it.
  void submit(Work work);
  /// The same for what is never a part of a graph.
  void enqueue(Work work);
  void replay(const Graph& graph);
  void synchronize();
  /// How much has been submitted and has not run. The host may not look at what it will write.
  std::size_t waiting() const { return queue_.size(); }

  /// Late: all that the host does until it waits has happened when the work runs.
  bool late = false;
  Graph* capture = nullptr;

 private:
  struct Item {
    Work work;
    std::unique_ptr<char> token;  ///< What the host knew when it submitted the work.
  };
  void run(Item item);
  static void run_items();

  std::int64_t id_;
  std::deque<Item> queue_;
  Item running_;
  // Work is run by a fiber of the stream's own: what is done on the stream is ordered with it
  // alone, and shares no stack with the host.
  Stacks stack_{1};
  Fiber worker_;
  char done_token_ = 0;
};

/// The current stream of the calling thread; the default one has the id 0.
Stream& current_stream();
Stream& stream_of_id(std::int64_t id);

/// Makes a stream the current one of the calling thread.
class UseStream {
 public:
  explicit UseStream(Stream& stream);
  ~UseStream();
  UseStream(const UseStream&) = delete;
  UseStream& operator=(const UseStream&) = delete;

 private:
  Stream* before_;
};

/// Captures a stream in CUDA's mode "global": unsafe calls are refused to all threads that have not
/// asked for the mode "relaxed", whichever stream they are for.
class Capture {
 public:
  Capture(Stream& stream, Graph& graph);
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

 private:
  Stream& stream_;
};

/// Of the calling thread; returns what it was.
bool set_relaxed_capture(bool relaxed);
/// Whether a call that may wait for the device is refused now; says so.
bool refused_in_capture(const char* call);

/// Memory with a red zone right behind it, as of a tensor of this size; null for none.
void* make_device_memory(std::size_t bytes);
/// The caching allocator's: the graph's own under capture, else freed in the stream's order.
void* allocate_on_stream(std::size_t bytes);
void free_on_stream(void* memory, Stream& stream);

/// Memory of cudaMalloc, which our code never frees, and how often it has been asked for.
std::size_t permanent_allocations();
void* make_permanent_memory(std::size_t bytes);

}  // namespace emulator
