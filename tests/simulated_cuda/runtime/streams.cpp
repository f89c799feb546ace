// SPDX-License-Identifier: Apache-2.0
#include "simulated_cuda/runtime/streams.h"

#include "simulated_cuda/runtime/calls.h"
#include "simulated_cuda/runtime/settings.h"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace simulated_cuda {
namespace {

bool& late() {
  static bool value = settings().starts_late;
  return value;
}

// Objects are kept for good: work that waits may still name them.
std::set<Stream*>& streams() {
  static auto* const all = new std::set<Stream*>();
  return *all;
}
std::set<Event*>& events() {
  static auto* const all = new std::set<Event*>();
  return *all;
}
std::set<Capture*>& captures() {
  static auto* const all = new std::set<Capture*>();
  return *all;
}

Stream& legacy_stream(int device) {
  static auto* const all = [] {
    auto* const made = new Stream[kMostDevices];
    for (int i = 0; i < kMostDevices; ++i) {
      made[i].device = i;
      made[i].legacy = true;
      streams().insert(&made[i]);
    }
    return made;
  }();
  return all[device];
}

}  // namespace

Stream* find_stream(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
    return &legacy_stream(thread_state().device);
  }
  const auto found = streams().find(reinterpret_cast<Stream*>(handle));
  return found == streams().end() ? nullptr : *found;
}

Event* find_event(cudaEvent_t handle) {
  const auto found = events().find(reinterpret_cast<Event*>(handle));
  return found == events().end() ? nullptr : *found;
}

cudaStream_t make_stream(int device, int priority) {
  auto* const stream = new Stream();
  stream->device = device;
  stream->priority = priority;
  streams().insert(stream);
  return reinterpret_cast<cudaStream_t>(stream);
}

cudaEvent_t make_event(int device, bool timed) {
  auto* const event = new Event();
  event->device = device;
  event->timed = timed;
  events().insert(event);
  return reinterpret_cast<cudaEvent_t>(event);
}

void destroy(Stream& stream) {
  finish(stream);
  streams().erase(&stream);
}
void destroy(Event& event) { events().erase(&event); }

void run_one(Stream& stream) {
  const Work work = std::move(stream.queue.front());
  stream.queue.pop_front();
  work();
}

void finish(Stream& stream) {
  while (!stream.queue.empty()) {
    run_one(stream);
  }
}

void finish_all() {
  for (Stream* const stream : streams()) {
    finish(*stream);
  }
}

void enqueue(Stream& stream, Work work) {
  stream.queue.push_back(std::move(work));
  if (!late()) {
    finish(stream);
  }
}

void submit(Stream& stream, Work work, const char* name, Reach reach) {
  if (traces()) {
    std::fprintf(stderr, "simulated CUDA: [%p%s] %s\n", static_cast<void*>(&stream),
                 stream.capture != nullptr ? " captured" : "", name);
  }
  Capture* const capture = stream.capture;
  if (capture == nullptr) {
    enqueue(stream, std::move(work));
    return;
  }
  if (reach == Reach::kDevice) {
    work();
  }
  capture->graph->nodes.push_back({std::move(work), name});
  stream.known[&stream] = ++capture->recorded[&stream];
}

void reach(Event& event, std::uint64_t record) {
  while (event.reached < record && event.stream != nullptr && !event.stream->queue.empty()) {
    run_one(*event.stream);
  }
}

bool set_late(bool value) {
  const std::scoped_lock lock(state_mutex());
  if (!value) {
    finish_all();
  }
  return std::exchange(late(), value);
}

Capture* capture_of(const Event& event) {
  const auto is_its = [&](const Capture* capture) { return capture->id == event.capture_id; };
  const auto found = std::ranges::find_if(captures(), is_its);
  return found == captures().end() ? nullptr : *found;
}

bool disturb_captures() {
  const auto mode = thread_state().capture_mode;
  bool disturbed = false;
  for (Capture* const capture : captures()) {
    const bool own = capture->owner == std::this_thread::get_id() &&
                     mode != cudaStreamCaptureModeRelaxed &&
                     capture->mode != cudaStreamCaptureModeRelaxed;
    const bool of_others =
        mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
    if (own || of_others) {
      capture->invalid = true;
      disturbed = true;
    }
  }
  return disturbed;
}

void begin_capture(Stream& stream, cudaStreamCaptureMode mode) {
  static unsigned long long last_id = 0;
  finish_all();
  auto* const capture = new Capture();
  capture->id = ++last_id;
  capture->mode = mode;
  capture->owner = std::this_thread::get_id();
  capture->origin = &stream;
  capture->streams.insert(&stream);
  capture->before = take_snapshot();
  stream.capture = capture;
  stream.known.clear();
  captures().insert(capture);
}

cudaError_t end_capture(Stream& stream, std::shared_ptr<Graph>& graph) {
  Capture* const capture = stream.capture;
  if (capture == nullptr) {
    return cudaErrorIllegalState;
  }
  if (capture->origin != &stream) {
    return cudaErrorStreamCaptureUnmatched;
  }
  if (capture->owner != std::this_thread::get_id() &&
      capture->mode != cudaStreamCaptureModeRelaxed) {
    return cudaErrorStreamCaptureWrongThread;
  }
  const bool joined = std::ranges::all_of(capture->recorded, [&](const auto& other) {
    return stream.known[other.first] >= other.second;
  });
  for (Stream* const other : capture->streams) {
    other->capture = nullptr;
  }
  captures().erase(capture);
  restore(capture->before);
  const bool invalid = capture->invalid;
  if (!invalid && joined) {
    graph = capture->graph;
  }
  delete capture;
  return invalid  ? cudaErrorStreamCaptureInvalidated
         : joined ? cudaSuccess
                  : cudaErrorStreamCaptureUnjoined;
}

cudaError_t join_capture(Stream& stream, const Event& event) {
  Capture* const capture = capture_of(event);
  if (stream.capture == nullptr) {
    finish(stream);
    stream.capture = capture;
    stream.known.clear();
    capture->streams.insert(&stream);
  } else if (stream.capture != capture) {
    stream.capture->invalid = true;
    return cudaErrorStreamCaptureMerge;
  }
  for (const auto& [other, count] : event.clock) {
    std::size_t& known = stream.known[other];
    known = std::max(known, count);
  }
  return cudaSuccess;
}

// -- for the other parts (simulated_cuda.h) --

void record(cudaStream_t stream, Work work, const char* name) {
  const std::scoped_lock lock(state_mutex());
  submit(*find_stream(stream), std::move(work), name, Reach::kHost);
}

void flush(cudaStream_t stream) {
  const std::scoped_lock lock(state_mutex());
  finish(*find_stream(stream));
}

bool is_capturing(cudaStream_t stream) {
  const std::scoped_lock lock(state_mutex());
  return find_stream(stream)->capture != nullptr;
}

}  // namespace simulated_cuda
