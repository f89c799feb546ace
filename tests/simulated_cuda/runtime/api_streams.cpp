// SPDX-License-Identifier: Apache-2.0
//
// The CUDA runtime's functions about streams and events: streams.h says what they stand for.
#include "simulated_cuda/runtime/calls.h"
#include "simulated_cuda/runtime/streams.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>

namespace simulated_cuda {
namespace {

/// Calls `body` with the stream, which a handle must name.
template <typename Body>
cudaError_t on_stream(Function function, cudaStream_t handle, const Body& body) {
  return call(function, [&] {
    Stream* const stream = find_stream(handle);
    return stream == nullptr ? cudaErrorInvalidResourceHandle : body(*stream);
  });
}

template <typename Body>
cudaError_t on_event(Function function, cudaEvent_t handle, const Body& body) {
  return call(function, [&] {
    Event* const event = find_event(handle);
    return event == nullptr ? cudaErrorInvalidResourceHandle : body(*event);
  });
}

/// Refuses calls about the past of a captured stream.
cudaError_t past_of(Stream& stream, const char* name) {
  if (stream.capture == nullptr) return cudaSuccess;
  stream.capture->invalid = true;
  return because(cudaErrorStreamCaptureUnsupported, "%s of a captured stream", name);
}

cudaError_t record_event(Event& event, Stream& stream) {
  if (event.device != stream.device) {
    return because(cudaErrorInvalidResourceHandle, "an event of device %d on a stream of device %d",
                   event.device, stream.device);
  }
  event.stream = &stream;
  event.queries = 0;
  event.capture_id = stream.capture == nullptr ? 0 : stream.capture->id;
  if (stream.capture != nullptr) {
    event.clock = stream.known;
    return cudaSuccess;
  }
  const auto record = ++event.recorded;
  enqueue(stream, [&event, record] {
    event.reached = std::max(event.reached, record);
    event.when = std::chrono::steady_clock::now();
  });
  return cudaSuccess;
}

cudaError_t wait_for_event(Stream& stream, Event& event) {
  if (capture_of(event) != nullptr) {
    return join_capture(stream, event);
  }
  if (event.recorded == 0) return cudaSuccess;
  if (stream.capture != nullptr) {
    stream.capture->invalid = true;
    return because(cudaErrorStreamCaptureIsolation, "a captured stream waits for what is not");
  }
  if (event.reached < event.recorded) {
    enqueue(stream, [&event, record = event.recorded] { reach(event, record); });
  }
  return cudaSuccess;
}

}  // namespace
}  // namespace simulated_cuda

using namespace simulated_cuda;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* to, unsigned /*flags*/, int priority) {
  return call(Function::cudaStreamCreateWithPriority, [&] {
    *to = make_stream(thread_state().device, priority);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamCreate(cudaStream_t* to) {
  return call(Function::cudaStreamCreate, [&] {
    *to = make_stream(thread_state().device, 0);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* to, unsigned /*flags*/) {
  return call(Function::cudaStreamCreateWithFlags, [&] {
    *to = make_stream(thread_state().device, 0);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return on_stream(Function::cudaStreamDestroy, handle, [](Stream& stream) {
    if (stream.legacy) return cudaErrorInvalidResourceHandle;
    destroy(stream);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  return on_stream(Function::cudaStreamGetPriority, handle, [&](const Stream& stream) {
    *priority = stream.priority;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return on_stream(Function::cudaStreamQuery, handle, [](Stream& stream) {
    if (const auto error = past_of(stream, "cudaStreamQuery"); error != cudaSuccess) return error;
    if (stream.queue.empty()) return cudaSuccess;
    run_one(stream);
    return cudaErrorNotReady;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return on_stream(Function::cudaStreamSynchronize, handle, [](Stream& stream) {
    const auto error = past_of(stream, "cudaStreamSynchronize");
    if (error != cudaSuccess) return error;
    count(Count::waits);
    finish(stream);
    return cudaSuccess;
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  return on_stream(Function::cudaLaunchHostFunc, handle, [=](Stream& stream) {
    submit(stream, [=] { function(data); }, "host function", Reach::kHost);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback, void* data,
                                  unsigned /*flags*/) {
  return on_stream(Function::cudaStreamAddCallback, handle, [=](Stream& stream) {
    const auto error = past_of(stream, "cudaStreamAddCallback");
    if (error != cudaSuccess) return error;
    submit(stream, [=] { callback(handle, cudaSuccess, data); }, "callback", Reach::kHost);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned /*flags*/) {
  return on_stream(Function::cudaStreamWaitEvent, handle, [=](Stream& stream) {
    Event* const event = find_event(event_handle);
    return event == nullptr ? cudaErrorInvalidResourceHandle : wait_for_event(stream, *event);
  });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* to, unsigned flags) {
  return call(Function::cudaEventCreateWithFlags, [&] {
    *to = make_event(thread_state().device, (flags & cudaEventDisableTiming) == 0);
    return cudaSuccess;
  });
}

cudaError_t cudaEventCreate(cudaEvent_t* to) {
  return call(Function::cudaEventCreate, [&] {
    *to = make_event(thread_state().device, true);
    return cudaSuccess;
  });
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  return on_event(Function::cudaEventDestroy, handle, [](Event& event) {
    destroy(event);
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  return on_event(Function::cudaEventRecord, handle, [=](Event& event) {
    Stream* const on = find_stream(stream);
    return on == nullptr ? cudaErrorInvalidResourceHandle : record_event(event, *on);
  });
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned /*flags*/) {
  return on_event(Function::cudaEventRecordWithFlags, handle, [=](Event& event) {
    Stream* const on = find_stream(stream);
    return on == nullptr ? cudaErrorInvalidResourceHandle : record_event(event, *on);
  });
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return on_event(Function::cudaEventQuery, handle, [](Event& event) {
    if (capture_of(event) != nullptr) return cudaErrorCapturedEvent;
    if (event.reached >= event.recorded) return cudaSuccess;
    // Who asks again and again waits for it.
    constexpr unsigned kPatience = 2;
    if (++event.queries > kPatience) {
      reach(event, event.recorded);
    }
    return cudaErrorNotReady;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  return on_event(Function::cudaEventSynchronize, handle, [](Event& event) {
    if (Capture* const capture = capture_of(event); capture != nullptr) {
      capture->invalid = true;
      return cudaErrorCapturedEvent;
    }
    count(Count::waits);
    if (event.reached < event.recorded) count(Count::waits_for_undone);
    reach(event, event.recorded);
    return cudaSuccess;
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return call(Function::cudaEventElapsedTime, [&] {
    const Event* const first = find_event(start);
    const Event* const last = find_event(end);
    if (first == nullptr || last == nullptr || !first->timed || !last->timed ||
        first->recorded == 0 || last->recorded == 0) {
      return cudaErrorInvalidResourceHandle;
    }
    if (first->reached < first->recorded || last->reached < last->recorded) {
      return cudaErrorNotReady;
    }
    *milliseconds = std::chrono::duration<float, std::milli>(last->when - first->when).count();
    return cudaSuccess;
  });
}

}  // extern "C"
