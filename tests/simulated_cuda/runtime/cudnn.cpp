// SPDX-License-Identifier: Apache-2.0
//
// The functions of cuDNN that torch's autocast asks where recurrent weights lie in cuDNN's buffer.
//
// Stands for: the order of that buffer as far as torch relies on it: of each layer and direction
// one matrix or bias behind the other, input gates before hidden ones. Does not stand for: anything
// that computes; torch's operators over cuDNN are redirected or refused (redirect/). The types are
// those of cuDNN as callers pass them: pointers, and enumerations that are ints.
#include <algorithm>
#include <cstddef>
#include <iterator>
#include <vector>

namespace {

enum Status : int { kSuccess = 0, kBadParameter = 2000 };
enum Mode : int { kReluRnn = 0, kTanhRnn = 1, kLstm = 2, kGru = 3 };

struct Handle {
  void* stream = nullptr;
};

struct TensorDescriptor {
  int type = 0;
  std::vector<int> sizes;
};

struct RnnDescriptor {
  int mode = kLstm;
  bool bidirectional = false;
  int type = 0;
  int input = 0;
  int hidden = 0;
  int projected = 0;  ///< As many as `hidden` without a projection.
  int layers = 0;

  int directions() const { return bidirectional ? 2 : 1; }
  int count() const { return layers * directions(); }
  int gates() const { return mode == kLstm ? 4 : mode == kGru ? 3 : 1; }
  bool projects() const { return projected != hidden; }
};

/// A matrix or a bias: where it begins, in elements, and its sizes.
struct Place {
  std::size_t begin;
  int rows;
  int columns;

  std::size_t end() const {
    return begin + static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns);
  }
};

std::size_t bytes_of(int type) {
  constexpr std::size_t kBytes[] = {4, 8, 2};  // float, double, half
  return type >= 0 && type < static_cast<int>(std::size(kBytes)) ? kBytes[type] : 2;
}

/// Matrices of a layer: a gate each for the input, then for the hidden state; then a projection.
std::vector<Place> matrices_of(const RnnDescriptor& rnn, int layer, std::size_t begin) {
  std::vector<Place> places;
  const auto add = [&](int rows, int columns) {
    places.push_back({places.empty() ? begin : places.back().end(), rows, columns});
  };
  const int inputs = layer < rnn.directions() ? rnn.input : rnn.projected * rnn.directions();
  for (int i = 0; i < rnn.gates(); ++i) add(rnn.hidden, inputs);
  for (int i = 0; i < rnn.gates(); ++i) add(rnn.hidden, rnn.projected);
  if (rnn.projects()) add(rnn.projected, rnn.hidden);
  return places;
}

std::size_t end_of_matrices(const RnnDescriptor& rnn, int layers) {
  std::size_t end = 0;
  for (int i = 0; i < layers; ++i) end = matrices_of(rnn, i, end).back().end();
  return end;
}

/// Biases lie behind all matrices, two of each gate.
Place bias_of(const RnnDescriptor& rnn, int layer, int which) {
  const auto before = static_cast<std::size_t>(layer * 2 * rnn.gates() + which);
  const auto hidden = static_cast<std::size_t>(rnn.hidden);
  return {end_of_matrices(rnn, rnn.count()) + before * hidden, rnn.hidden, 1};
}

void describe(const Place& place, const RnnDescriptor& rnn, void* buffer,
              TensorDescriptor* descriptor, void** address) {
  if (descriptor == nullptr || address == nullptr) return;
  *descriptor = {rnn.type, {1, place.rows, place.columns}};
  *address = static_cast<char*>(buffer) + place.begin * bytes_of(rnn.type);
}

template <typename Object>
int make(Object** to) {
  *to = new Object();
  return kSuccess;
}
template <typename Object>
int destroy(Object* object) {
  delete object;
  return kSuccess;
}

}  // namespace

extern "C" {

int cudnnCreate(Handle** to) { return make(to); }
int cudnnDestroy(Handle* handle) { return destroy(handle); }
int cudnnSetStream(Handle* handle, void* stream) {
  handle->stream = stream;
  return kSuccess;
}
int cudnnGetStream(Handle* handle, void** stream) {
  *stream = handle->stream;
  return kSuccess;
}

int cudnnCreateDropoutDescriptor(int** to) { return make(to); }
int cudnnDestroyDropoutDescriptor(int* descriptor) { return destroy(descriptor); }
int cudnnSetDropoutDescriptor(int* /*descriptor*/, Handle* /*handle*/, float /*probability*/,
                              void* /*states*/, std::size_t /*bytes*/,
                              unsigned long long /*seed*/) {
  return kSuccess;
}

int cudnnCreateTensorDescriptor(TensorDescriptor** to) { return make(to); }
int cudnnDestroyTensorDescriptor(TensorDescriptor* descriptor) { return destroy(descriptor); }
int cudnnSetTensorNdDescriptor(TensorDescriptor* descriptor, int type, int count, const int* sizes,
                               const int* /*strides*/) {
  *descriptor = {type, {sizes, sizes + count}};
  return kSuccess;
}
int cudnnGetTensorNdDescriptor(const TensorDescriptor* descriptor, int most, int* type, int* count,
                               int* sizes, int* strides) {
  *type = descriptor->type;
  *count = static_cast<int>(descriptor->sizes.size());
  if (*count > most) return kBadParameter;
  int stride = 1;
  for (int i = *count; i-- > 0;) {
    sizes[i] = descriptor->sizes[static_cast<std::size_t>(i)];
    strides[i] = stride;
    stride *= sizes[i];
  }
  return kSuccess;
}

int cudnnCreateRNNDescriptor(RnnDescriptor** to) { return make(to); }
int cudnnDestroyRNNDescriptor(RnnDescriptor* descriptor) { return destroy(descriptor); }
int cudnnSetRNNDescriptor_v8(RnnDescriptor* descriptor, int /*algorithm*/, int mode, int /*bias*/,
                             int direction, int /*input_mode*/, int type, int /*precision*/,
                             int /*math*/, int input, int hidden, int projected, int layers,
                             int* /*dropout*/, unsigned /*flags*/) {
  *descriptor = {mode, direction != 0, type, input, hidden, projected, layers};
  return kSuccess;
}

int cudnnGetRNNWeightSpaceSize(Handle* /*handle*/, const RnnDescriptor* rnn, std::size_t* bytes) {
  *bytes = bias_of(*rnn, rnn->count(), 0).begin * bytes_of(rnn->type);
  return kSuccess;
}

int cudnnGetRNNWeightParams(Handle* /*handle*/, const RnnDescriptor* rnn, int layer,
                            std::size_t /*bytes*/, void* buffer, int which,
                            TensorDescriptor* matrix, void** matrix_at, TensorDescriptor* bias,
                            void** bias_at) {
  const auto matrices = matrices_of(*rnn, layer, end_of_matrices(*rnn, layer));
  if (which < 0 || which >= static_cast<int>(matrices.size())) return kBadParameter;
  describe(matrices[static_cast<std::size_t>(which)], *rnn, buffer, matrix, matrix_at);
  describe(bias_of(*rnn, layer, which), *rnn, buffer, bias, bias_at);
  return kSuccess;
}

}  // extern "C"
