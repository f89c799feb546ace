// SPDX-License-Identifier: Apache-2.0
#include "cuda_on_cpu/emulator/runtime.h"

#include "cuda_on_cpu/emulator/grid.h"
#include "cuda_on_cpu/emulator/memory_order.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>
#include <utility>

namespace emulator {
namespace {

int g_captures = 0;
std::size_t g_permanent = 0;
thread_local bool t_relaxed = false;
thread_local Stream* t_stream = nullptr;
thread_local Stream* t_running = nullptr;

/// Streams by their ids, of which there are few.
std::map<std::int64_t, Stream*>& streams() {
  static auto* const all = new std::map<std::int64_t, Stream*>();
  return *all;
}

/// libstdc++ counts references with plain additions until the process makes its first thread, and
/// streams share what graphs refer to.
const bool g_counts_atomically = [] {
  std::thread([] {}).join();
  return true;
}();

Stream& default_stream() {
  static auto* const stream = new Stream(0);
  return *stream;
}

}  // namespace

Device& device() {
  static Device instance;
  return instance;
}

Statistics& statistics() {
  static Statistics instance;
  return instance;
}

Graph::~Graph() {
  for (void* block : memory) {
    std::free(block);
  }
}

Stream::Stream(std::int64_t id) : id_(id), worker_(stack_.at(0), run_items) {
  check(streams().emplace(id, this).second, "each stream has an id of its own");
}

Stream::~Stream() {
  synchronize();
  streams().erase(id_);
}

void Stream::submit(Work work) {
  if (capture != nullptr) {
    capture->nodes.push_back(std::move(work));
  } else {
    enqueue(std::move(work));
  }
}

void Stream::enqueue(Work work) {
  queue_.push_back({std::move(work), std::make_unique<char>()});
  publish(queue_.back().token.get());
  if (!late) {
    synchronize();
  }
}

void Stream::replay(const Graph& graph) {
  for (const auto& node : graph.nodes) {
    submit(node);
  }
}

void Stream::run_items() {
  t_running->worker_.started();
  for (;;) {
    Stream& stream = *t_running;
    learn(stream.running_.token.get());
    stream.running_.work();
    stream.running_.work = nullptr;  // what a kernel was given is freed after it
    publish(&stream.done_token_);
    stream.worker_.suspend();
  }
}

void Stream::run(Item item) {
  running_ = std::move(item);
  t_running = this;
  worker_.resume();
}

void Stream::synchronize() {
  while (!queue_.empty()) {
    Item item = std::move(queue_.front());
    queue_.pop_front();
    run(std::move(item));
  }
  learn(&done_token_);
}

Stream& current_stream() { return t_stream == nullptr ? default_stream() : *t_stream; }

Stream& stream_of_id(std::int64_t id) { return id == 0 ? default_stream() : *streams().at(id); }

UseStream::UseStream(Stream& stream) : before_(std::exchange(t_stream, &stream)) {}
UseStream::~UseStream() { t_stream = before_; }

Capture::Capture(Stream& stream, Graph& graph) : stream_(stream) {
  stream_.capture = &graph;
  ++g_captures;
}

Capture::~Capture() {
  stream_.capture = nullptr;
  --g_captures;
}

bool set_relaxed_capture(bool relaxed) { return std::exchange(t_relaxed, relaxed); }

bool refused_in_capture(const char* call) {
  const bool refused = g_captures != 0 && !t_relaxed;
  if (refused) {
    std::fprintf(stderr, "emulator: %s while a stream is captured\n", call);
  }
  return refused;
}

void* make_device_memory(std::size_t bytes) {
  void* memory = nullptr;
  if (bytes != 0 && posix_memalign(&memory, 256, bytes) == 0) {
    std::memset(memory, 0xcd, bytes);
  }
  return memory;
}

void* allocate_on_stream(std::size_t bytes) {
  void* const memory = make_device_memory(bytes);
  if (Graph* const graph = current_stream().capture; graph != nullptr && memory != nullptr) {
    graph->memory.push_back(memory);
  }
  return memory;
}

void free_on_stream(void* memory, Stream& stream) {
  stream.enqueue([memory] { std::free(memory); });
}

std::size_t permanent_allocations() { return g_permanent; }

void* make_permanent_memory(std::size_t bytes) {
  ++g_permanent;
  return make_device_memory(bytes);
}

}  // namespace emulator
