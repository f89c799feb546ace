#include "autocast/cast_cache.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace fastamp::autocast {
namespace {

constexpr std::size_t kFirstIndexSize = 64;

/// `p.data = x` may change the sizes alone. A wrapper subclass answers in Python; its version has
/// to do.
bool has_same_geometry(const at::Tensor& source, const at::Tensor& cast) {
  return source.unsafeGetTensorImpl()->is_python_dispatch() ||
         (source.sizes() == cast.sizes() && source.strides() == cast.strides());
}

std::size_t hash(const c10::TensorImpl* key, c10::ScalarType to) {
  // Fibonacci hashing; the low four bits of an allocation's address carry nothing.
  constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15ULL;
  const auto address = reinterpret_cast<std::uintptr_t>(key) >> 4U;
  return static_cast<std::size_t>(((address ^ static_cast<std::uintptr_t>(to)) * kGolden) >> 32U);
}

}  // namespace

bool CastCache::is_usable(const Entry& entry, const at::Tensor& source) {
  // A cast made without grad mode would cut the weight off from its gradient.
  return entry.source.matches(source) && has_same_geometry(source, entry.cast) &&
         entry.required_grad == source.requires_grad() &&
         (entry.made_with_grad || !c10::GradMode::is_enabled()) &&
         entry.cast_version == version_of(entry.cast);
}

std::size_t CastCache::probe(const c10::TensorImpl* key, c10::ScalarType to) const {
  const std::size_t mask = index_.size() - 1;
  std::size_t slot = hash(key, to) & mask;
  while (index_[slot] != 0) {
    const Entry& entry = entries_[index_[slot] - 1];
    if (entry.source.key() == key && entry.to == to) {
      break;
    }
    slot = (slot + 1) & mask;
  }
  return slot;
}

const at::Tensor* CastCache::find(const at::Tensor& source, c10::ScalarType to) {
  const std::uint32_t position = index_[probe(source.unsafeGetTensorImpl(), to)];
  if (position == 0) {
    return nullptr;
  }
  Entry& entry = entries_[position - 1];
  if (!is_usable(entry, source)) {
    return nullptr;
  }
  entry.used = true;
  return &entry.cast;
}

std::vector<PlannedCast> CastCache::used_casts() const {
  std::vector<PlannedCast> used;
  for (const Entry& entry : entries_) {
    if (entry.used) {
      used.push_back({entry.source, entry.to});
    }
  }
  return used;
}

void CastCache::insert(const at::Tensor& source, c10::ScalarType to, const at::Tensor& cast,
                       bool used) {
  if (2 * (entries_.size() + 1) > index_.size()) {
    grow_index();
  }
  Entry entry{
      .source = TensorIdentity(source),
      .cast = cast,
      .cast_version = version_of(cast),
      .to = to,
      .required_grad = source.requires_grad(),
      .made_with_grad = c10::GradMode::is_enabled(),
      .used = used,
  };
  std::uint32_t& position = index_[probe(entry.source.key(), to)];
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
    index_[probe(entries_[i].source.key(), entries_[i].to)] = static_cast<std::uint32_t>(i + 1);
  }
}

void CastCache::clear() noexcept {
  if (!entries_.empty()) {
    entries_.clear();
    std::ranges::fill(index_, 0U);
  }
}

}  // namespace fastamp::autocast
