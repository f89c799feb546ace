/* SPDX-License-Identifier: Apache-2.0 */
/* Trains an MLP on handwritten digits in float32, bfloat16 and float16, in C.
 *
 * python examples/data/digits.py digits.bin && digits digits.bin
 *
 * Forward passes call torch's ops by its own C functions, which have no header for C: those that
 * are needed are declared here. Regions, scaler and optimizer are fastamp's. */
#include <fastamp/c_api.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define ITERATIONS 30
#define PIXELS 64
#define HIDDEN 256
#define DIGITS 10

/* Of torch: torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h. */
typedef uint64_t StableIValue;
int32_t aoti_torch_create_tensor_from_blob(void* data, int64_t ndim, const int64_t* sizes,
                                           const int64_t* strides, int64_t storage_offset,
                                           int32_t dtype, int32_t device_type,
                                           int32_t device_index, AtenTensorHandle* ret);
int32_t aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* ret);
int32_t aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
int32_t aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** ret);
int32_t aoti_torch_device_type_cpu(void);
int32_t aoti_torch_dtype_float32(void);
int32_t aoti_torch_dtype_bfloat16(void);
int32_t aoti_torch_dtype_float16(void);
int32_t aoti_torch_dtype_int64(void);
uint64_t aoti_torch_abi_version(void);
int32_t torch_call_dispatcher(const char* op, const char* overload, StableIValue* stack,
                              uint64_t version);

static void check(int is_right, const char* what) {
  if (!is_right) {
    fprintf(stderr, "digits: %s: %s\n", what, fastamp_last_error());
    exit(1);
  }
}

#define CHECK(call) check((call) == 0, #call)

/* An argument of an op, which takes a reference of its own. */
static StableIValue argument(AtenTensorHandle tensor) {
  AtenTensorHandle own = NULL;
  CHECK(aoti_torch_new_tensor_handle(tensor, &own));
  return (StableIValue)(uintptr_t)own;
}

/* The result of an op whose arguments are on the stack. */
static AtenTensorHandle call(const char* op, StableIValue* stack) {
  check(torch_call_dispatcher(op, "", stack, aoti_torch_abi_version()) == 0, op);
  return (AtenTensorHandle)(uintptr_t)stack[0];
}

static AtenTensorHandle linear(AtenTensorHandle x, AtenTensorHandle weight) {
  StableIValue stack[] = {argument(x), argument(weight), 0}; /* without a bias */
  return call("aten::linear", stack);
}

static AtenTensorHandle relu(AtenTensorHandle x) {
  StableIValue stack[] = {argument(x)};
  return call("aten::relu", stack);
}

static AtenTensorHandle cross_entropy(AtenTensorHandle logits, AtenTensorHandle target) {
  /* No weight; reduction: 1 is the mean; ignore_index; label_smoothing: the bits of 0.0. */
  StableIValue stack[] = {argument(logits), argument(target), 0, 1, (StableIValue)-100, 0};
  return call("aten::cross_entropy_loss", stack);
}

/* A tensor of two dimensions over memory that outlives it; of one where columns are 0. */
static AtenTensorHandle over(void* memory, int64_t rows, int64_t columns, int32_t dtype) {
  const int64_t sizes[] = {rows, columns}, strides[] = {columns ? columns : 1, 1};
  AtenTensorHandle tensor = NULL;
  CHECK(aoti_torch_create_tensor_from_blob(memory, columns ? 2 : 1, sizes, strides, 0, dtype,
                                           aoti_torch_device_type_cpu(), 0, &tensor));
  return tensor;
}

static void* read_block(FILE* file, size_t bytes) {
  void* block = malloc(bytes);
  check(block != NULL && fread(block, 1, bytes, file) == bytes, "cannot read the data");
  return block;
}

static uint64_t hash_of(const unsigned char* bytes, size_t count) {
  uint64_t hash = 1469598103934665603u; /* FNV-1a */
  for (size_t i = 0; i < count; ++i) {
    hash = (hash ^ bytes[i]) * 1099511628211u;
  }
  return hash;
}

typedef struct Data {
  int64_t rows;
  AtenTensorHandle x, y;
  const float *first, *second; /* initial weights: HIDDEN x PIXELS, DIGITS x HIDDEN */
} Data;

static void copy(float* to, const float* from, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    to[i] = from[i];
  }
}

static float loss_of(const Data* data, const AtenTensorHandle* weights, int32_t dtype,
                     FastampScaler* scaler) {
  const int is_region = dtype != aoti_torch_dtype_float32();
  FastampRegion* region = NULL;
  CHECK(fastamp_region_begin(aoti_torch_device_type_cpu(),
                             is_region ? dtype : FASTAMP_DEFAULT_DTYPE, is_region, &region));
  const AtenTensorHandle hidden = linear(data->x, weights[0]), active = relu(hidden);
  const AtenTensorHandle logits = linear(active, weights[1]);
  const AtenTensorHandle loss = cross_entropy(logits, data->y);
  CHECK(fastamp_region_end(region));
  AtenTensorHandle scaled = NULL;
  CHECK(fastamp_scaler_scale(scaler, loss, &scaled));
  CHECK(fastamp_tensor_backward(scaled));
  void* value = NULL;
  CHECK(aoti_torch_get_data_ptr(loss, &value));
  const float found = *(const float*)value;
  const AtenTensorHandle all[] = {hidden, active, logits, loss, scaled};
  for (size_t i = 0; i < sizeof(all) / sizeof(*all); ++i) {
    CHECK(aoti_torch_delete_tensor_object(all[i]));
  }
  return found;
}

static void train(const Data* data, const char* name, int32_t dtype) {
  static float first[HIDDEN * PIXELS], second[DIGITS * HIDDEN];
  copy(first, data->first, HIDDEN * PIXELS);
  copy(second, data->second, DIGITS * HIDDEN);
  const int32_t float32 = aoti_torch_dtype_float32();
  AtenTensorHandle weights[] = {over(first, HIDDEN, PIXELS, float32),
                                over(second, DIGITS, HIDDEN, float32)};
  for (int i = 0; i < 2; ++i) {
    CHECK(fastamp_tensor_set_requires_grad(weights[i], 1));
  }
  FastampSgdOptions options;
  CHECK(fastamp_sgd_options_init(&options));
  options.lr = 0.1;
  options.momentum = 0.9;
  FastampOptimizer* optimizer = NULL;
  CHECK(fastamp_sgd_new(weights, 2, &options, &optimizer));
  FastampScalerOptions scaling;
  CHECK(fastamp_scaler_options_init(&scaling));
  scaling.enabled = dtype == aoti_torch_dtype_float16();
  FastampScaler* scaler = NULL;
  CHECK(fastamp_scaler_new(&scaling, &scaler));
  float begun = 0, loss = 0;
  for (int i = 0; i < ITERATIONS; ++i) {
    CHECK(fastamp_optimizer_zero_grad(optimizer));
    loss = loss_of(data, weights, dtype, scaler);
    begun = i == 0 ? loss : begun;
    CHECK(fastamp_scaler_clip_grad_norm(scaler, optimizer, 1.0, 2.0, NULL));
    CHECK(fastamp_scaler_step(scaler, optimizer));
    CHECK(fastamp_scaler_update(scaler));
  }
  printf("%s: loss %a -> %a, weights %016llx %016llx\n", name, begun, loss,
         (unsigned long long)hash_of((const unsigned char*)first, sizeof(first)),
         (unsigned long long)hash_of((const unsigned char*)second, sizeof(second)));
  CHECK(fastamp_optimizer_free(optimizer));
  CHECK(fastamp_scaler_free(scaler));
  for (int i = 0; i < 2; ++i) {
    CHECK(aoti_torch_delete_tensor_object(weights[i]));
  }
}

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: digits DATA\n");
    return 1;
  }
  FILE* file = fopen(argv[1], "rb");
  check(file != NULL, "cannot open the data");
  int64_t* rows = read_block(file, sizeof(*rows));
  float* x = read_block(file, (size_t)*rows * PIXELS * sizeof(float));
  int64_t* y = read_block(file, (size_t)*rows * sizeof(int64_t));
  float* first = read_block(file, HIDDEN * PIXELS * sizeof(float));
  float* second = read_block(file, DIGITS * HIDDEN * sizeof(float));
  fclose(file);
  const Data data = {.rows = *rows,
                     .x = over(x, *rows, PIXELS, aoti_torch_dtype_float32()),
                     .y = over(y, *rows, 0, aoti_torch_dtype_int64()),
                     .first = first,
                     .second = second};
  train(&data, "float32", aoti_torch_dtype_float32());
  train(&data, "bfloat16", aoti_torch_dtype_bfloat16());
  train(&data, "float16", aoti_torch_dtype_float16());
  CHECK(aoti_torch_delete_tensor_object(data.x));
  CHECK(aoti_torch_delete_tensor_object(data.y));
  free(rows);
  free(x);
  free(y);
  free(first);
  free(second);
  return 0;
}
