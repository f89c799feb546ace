#include "autocast/kept_cast_store.h"
#include "autocast/thread_cache.h"

#include <fastamp/autocast/kept_casts.h>

namespace fastamp {
namespace {

using autocast::KeptCastStore;

}  // namespace

KeepCasts::KeepCasts(const std::vector<at::Tensor>& weights)
    : id_(KeptCastStore::instance().acquire(weights)) {}

KeepCasts::~KeepCasts() { release(); }

void KeepCasts::release() const { KeptCastStore::instance().release(id_); }

KeptCasts kept_casts() { return KeptCastStore::instance().count(); }

void drop_kept_casts() {
  KeptCastStore::instance().drop();
  autocast::clear_thread_cache();
}

void drop_kept_casts(const std::vector<at::Tensor>& weights) {
  std::vector<const c10::TensorImpl*> keys;
  keys.reserve(weights.size());
  for (const at::Tensor& weight : weights) {
    keys.push_back(weight.unsafeGetTensorImpl());
  }
  KeptCastStore::instance().drop(keys);
  autocast::forget_weight_casts(keys);
}

}  // namespace fastamp
