#include "autocast/cast_cache.h"

#include "autocast/execution_context.h"
#include "autocast/tensor_identity.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace fastamp::autocast {
namespace {

constexpr std::size_t kFirstIndexSize = 64;

std::size_t hash(const c10::TensorImpl* key, c10::ScalarType to) {
  // Fibonacci hashing; the low four bits of an allocation's address carry nothing.
  constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15ULL;
  const auto address = reinterpret_cast<std::uintptr_t>(key) >> 4U;
  return static_cast<std::size_t>(((address ^ static_cast<std::uintptr_t>(to)) * kGolden) >> 32U);
}

}  // namespace

bool CastCache::is_usable(const Entry& entry, const at::Tensor& source) const {
  // A cast made without grad mode would cut the weight off from its gradient.
  return entry.source_version == version_of(source) && entry.data == data_of(source) &&
         source.requires_grad() && (entry.made_with_grad || !c10::GradMode::is_enabled()) &&
         entry.cast_version == version_of(entry.cast) &&
         (!source.is_cuda() || entry.context == execution_context(source.device()));
}

std::size_t CastCache::probe(const c10::TensorImpl* key, c10::ScalarType to) const {
  const std::size_t mask = index_.size() - 1;
  std::size_t slot = hash(key, to) & mask;
  while (index_[slot] != 0) {
    const Entry& entry = entries_[index_[slot] - 1];
    if (entry.key == key && entry.to == to) {
      break;
    }
    slot = (slot + 1) & mask;
  }
  return slot;
}

const at::Tensor* CastCache::find(const at::Tensor& source, c10::ScalarType to) const {
  const std::uint32_t position = index_[probe(source.unsafeGetTensorImpl(), to)];
  if (position == 0) {
    return nullptr;
  }
  const Entry& entry = entries_[position - 1];
  return is_usable(entry, source) ? &entry.cast : nullptr;
}

void CastCache::insert(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast) {
  if (2 * (entries_.size() + 1) > index_.size()) {
    grow_index();
  }
  Entry entry{
      .key = source.unsafeGetTensorImpl(),
      .source = WeakTensor(source.getIntrusivePtr()),
      .cast = cast,
      .data = data_of(source),
      .context = execution_context(source.device()),
      .source_version = version_of(source),
      .cast_version = version_of(cast),
      .to = to,
      .made_with_grad = c10::GradMode::is_enabled(),
  };
  std::uint32_t& position = index_[probe(entry.key, to)];
  if (position != 0) {
    entries_[position - 1] = std::move(entry);
    return;
  }
  entries_.push_back(std::move(entry));
  position = static_cast<std::uint32_t>(entries_.size());
}

void CastCache::grow_index() {
  index_.assign(std::max(kFirstIndexSize, 2 * index_.size()), 0);
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    index_[probe(entries_[i].key, entries_[i].to)] = static_cast<std::uint32_t>(i + 1);
  }
}

void CastCache::clear() noexcept {
  if (!entries_.empty()) {
    entries_.clear();
    std::fill(index_.begin(), index_.end(), 0U);
  }
}

}  // namespace fastamp::autocast
