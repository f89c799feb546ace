// SPDX-License-Identifier: Apache-2.0
#pragma once

// Streams, events, captures and graphs.
//
// Stands for: the order of work on a stream and between streams that events join; captures in
// CUDA's three modes with their refusals; graphs. Work runs at once, or, in late mode, as late as
// the calls that wait allow, so that what is reused or read too early is seen.
//
// Work of a captured stream is recorded and also run, since torch's operators read the shapes of
// their results only so; all device memory is set back when the capture ends.
//
// Does not stand for: work that runs at the same time, priorities, the implicit order of the legacy
// stream with blocking ones, the edges of a graph (its nodes run in the order they were captured).

#include "simulated_cuda/runtime/memory.h"
#include "simulated_cuda/simulated_cuda.h"

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace simulated_cuda {

struct Stream;

struct Node {
  Work work;
  std::string name;
};

struct Graph {
  std::vector<Node> nodes;
};

/// For each stream of a capture, how many of its nodes come before.
using Clock = std::map<const Stream*, std::size_t>;

struct Capture {
  unsigned long long id = 0;
  cudaStreamCaptureMode mode{};
  std::thread::id owner;
  Stream* origin = nullptr;
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  std::set<Stream*> streams;
  Clock recorded;
  bool invalid = false;
  Snapshot before;
};

struct Stream {
  int device = 0;
  int priority = 0;
  bool legacy = false;
  std::deque<Work> queue;
  Capture* capture = nullptr;
  Clock known;  ///< Under capture: what comes before its next node.
};

struct Event {
  int device = 0;
  bool timed = true;
  Stream* stream = nullptr;
  std::uint64_t recorded = 0;  ///< The number of the last record,
  std::uint64_t reached = 0;   ///< and of the last that its stream has come to.
  unsigned queries = 0;
  unsigned long long capture_id = 0;  ///< Of the capture it was last recorded in; else 0.
  Clock clock;
  std::chrono::steady_clock::time_point when;
};

// Null: there is no such object, or no more.
Stream* find_stream(cudaStream_t handle);
Event* find_event(cudaEvent_t handle);
cudaStream_t make_stream(int device, int priority);
cudaEvent_t make_event(int device, bool timed);
void destroy(Stream& stream);
void destroy(Event& event);

/// Whether the work reaches the host: it then only becomes a node, since nothing sets it back.
enum class Reach : std::uint8_t { kDevice, kHost };
/// Puts work on a stream: runs it now or late, or captures it.
void submit(Stream& stream, Work work, const char* name, Reach reach = Reach::kDevice);
/// Puts what is no node of graphs on a stream.
void enqueue(Stream& stream, Work work);
void finish(Stream& stream);
void finish_all();
/// Runs the next of what waits, as an asking call lets time pass.
void run_one(Stream& stream);
/// Runs the event's stream up to a record.
void reach(Event& event, std::uint64_t record);

/// Returns the mode before.
bool set_late(bool late);

/// The capture that the event was last recorded in, if it goes on; else null.
Capture* capture_of(const Event& event);
/// Whether a call of this thread that is unsafe disturbs a capture, which is then invalid.
bool disturb_captures();
void begin_capture(Stream& stream, cudaStreamCaptureMode mode);
cudaError_t end_capture(Stream& stream, std::shared_ptr<Graph>& graph);
/// Makes a stream wait for an event that was captured.
cudaError_t join_capture(Stream& stream, const Event& event);

}  // namespace simulated_cuda
