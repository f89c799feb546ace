// SPDX-License-Identifier: Apache-2.0
//
// The CUDA runtime's functions about capture and graphs: streams.h says what they stand for. Graphs
// are not printed, changed, updated or made by hand.
#include "simulated_cuda/runtime/calls.h"
#include "simulated_cuda/runtime/streams.h"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <memory>
#include <utility>

namespace simulated_cuda {
namespace {

using Held = std::shared_ptr<Graph>;

cudaStreamCaptureStatus status_of(const Stream& stream) {
  return stream.capture == nullptr ? cudaStreamCaptureStatusNone
         : stream.capture->invalid ? cudaStreamCaptureStatusInvalidated
                                   : cudaStreamCaptureStatusActive;
}

void replay(const Graph& graph) {
  for (const Node& node : graph.nodes) {
    if (traces()) {
      std::fprintf(stderr, "simulated CUDA:   replays %s\n", node.name.c_str());
    }
    node.work();
  }
}

cudaError_t instantiate(cudaGraphExec_t* to, cudaGraph_t graph) {
  *to = reinterpret_cast<cudaGraphExec_t>(new Held(*reinterpret_cast<Held*>(graph)));
  return cudaSuccess;
}

}  // namespace
}  // namespace simulated_cuda

using namespace simulated_cuda;

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return call(Function::cudaThreadExchangeStreamCaptureMode, [&] {
    std::swap(*mode, thread_state().capture_mode);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return call(Function::cudaStreamIsCapturing, [&] {
    const Stream* const stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    *status = status_of(*stream);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     std::size_t* count) {
  return call(Function::cudaStreamGetCaptureInfo, [&] {
    const Stream* const stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    *status = status_of(*stream);
    if (stream->capture != nullptr) {
      if (id != nullptr) *id = stream->capture->id;
      if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(&stream->capture->graph);
    }
    if (nodes != nullptr) *nodes = nullptr;
    if (edges != nullptr) *edges = nullptr;
    if (count != nullptr) *count = 0;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  return call(Function::cudaStreamBeginCapture, [&] {
    Stream* const stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (stream->legacy) return cudaErrorStreamCaptureUnsupported;
    if (stream->capture != nullptr) return cudaErrorIllegalState;
    begin_capture(*stream, mode);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* to) {
  return call(Function::cudaStreamEndCapture, [&] {
    *to = nullptr;
    Stream* const stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    Held graph;
    const auto result = end_capture(*stream, graph);
    if (graph != nullptr) {
      *to = reinterpret_cast<cudaGraph_t>(new Held(std::move(graph)));
    }
    return result;
  });
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  return call(Function::cudaGraphGetNodes, [&] {
    auto& all = (*reinterpret_cast<Held*>(graph))->nodes;
    if (nodes == nullptr) {
      *count = all.size();
      return cudaSuccess;
    }
    for (std::size_t i = 0; i < *count && i < all.size(); ++i) {
      nodes[i] = reinterpret_cast<cudaGraphNode_t>(&all[i]);
    }
    return cudaSuccess;
  });
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t /*node*/, cudaGraphNode_t* /*nodes*/,
                                         cudaGraphEdgeData* /*edges*/, std::size_t* count) {
  return call(Function::cudaGraphNodeGetDependencies, [&] {
    *count = 0;
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* to, cudaGraph_t graph,
                                          unsigned long long /*flags*/) {
  return call(Function::cudaGraphInstantiateWithFlags, [&] { return instantiate(to, graph); });
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* to, cudaGraph_t graph,
                                 unsigned long long /*flags*/) {
  return call(Function::cudaGraphInstantiate, [&] { return instantiate(to, graph); });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  return call(Function::cudaGraphLaunch, [&] {
    Stream* const stream = find_stream(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    submit(*stream, [graph = *reinterpret_cast<Held*>(executable)] { replay(*graph); }, "graph");
    return cudaSuccess;
  });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return call(Function::cudaGraphDestroy, [&] {
    delete reinterpret_cast<Held*>(graph);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return call(Function::cudaGraphExecDestroy, [&] {
    delete reinterpret_cast<Held*>(executable);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphDebugDotPrint(cudaGraph_t /*graph*/, const char* /*path*/,
                                   unsigned /*flags*/) {
  return call(Function::cudaGraphDebugDotPrint, [] { return cudaSuccess; });
}

}  // extern "C"
