// SPDX-License-Identifier: Apache-2.0
#include "simulated_cuda/runtime/memory.h"

#include "simulated_cuda/runtime/settings.h"
#include "simulated_cuda/simulated_cuda.h"

#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

namespace simulated_cuda {
namespace {

constexpr int kRubbish = 0xcd;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kVector = 16;
// Living blocks from which on no more get a guard: Linux gives a process some 65,000 ranges of
// memory, and a guarded block takes two in each mapping.
constexpr std::size_t kMostGuarded = 12000;
constexpr std::size_t kAllBytes = kMostDevices * kDeviceBytes;

std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

/// A block: whole pages, and behind them a page of nobody's where it has a guard.
struct Block {
  char* begin;
  std::size_t pages;  ///< Bytes of them.
  std::size_t room;   ///< The same with the guard.
  std::size_t bytes;  ///< What was asked for.
};

struct Heap {
  std::recursive_mutex mutex;
  char* device = nullptr;  ///< The memory of all devices, one behind the other.
  char* host = nullptr;    ///< The same memory.
  int file = -1;
  std::map<char*, Block> used;  ///< By the address that the program has.
  std::map<char*, std::size_t> free;
  std::size_t in_use[kMostDevices] = {};
  int running[kMostDevices] = {};  ///< Emulated kernels.
  unsigned long until_failure = 0;
  bool fails = false;
  bool until_freed = false;
  struct sigaction handler_before = {};
};

[[noreturn]] void stop(const char* what) {
  std::perror(what);
  std::abort();
}

void protect(char* begin, std::size_t bytes, int access) {
  if (mprotect(begin, bytes, access) != 0) {
    stop("simulated CUDA: access to memory of devices");
  }
}

char* begin_of(const Heap& h, int device) {
  return h.device + static_cast<std::size_t>(device) * kDeviceBytes;
}

Heap* make_heap() {
  auto* const heap = new Heap();
  heap->file = memfd_create("simulated_cuda", MFD_CLOEXEC);
  if (heap->file < 0 || ftruncate(heap->file, static_cast<off_t>(kAllBytes)) != 0) {
    stop("simulated CUDA: memory for devices");
  }
  const auto map = [heap](int access) {
    void* const memory =
        mmap(nullptr, kAllBytes, access, MAP_SHARED | MAP_NORESERVE, heap->file, 0);
    if (memory == MAP_FAILED) {
      stop("simulated CUDA: memory for devices");
    }
    return static_cast<char*>(memory);
  };
  heap->device = map(PROT_NONE);
  heap->host = map(settings().guards ? PROT_NONE : PROT_READ | PROT_WRITE);
  for (int i = 0; i < kMostDevices; ++i) {
    heap->free[begin_of(*heap, i)] = kDeviceBytes;
  }
  return heap;
}

Heap& heap();

const char* describe(const Heap& h, const char* at) {
  if (at >= h.host && at < h.host + kAllBytes) {
    return "memory outside any block, behind a tensor's end or freed, is touched by an operator";
  }
  for (const int running : h.running) {
    if (running != 0) {
      return "memory outside any block, or another device's, is touched by a kernel";
    }
  }
  return "device memory is touched by the host";
}

void on_fault(int number, siginfo_t* info, void* context) {
  const Heap& h = heap();
  const auto* const at = static_cast<const char*>(info->si_addr);
  const auto is_in = [at](const char* memory) { return at >= memory && at < memory + kAllBytes; };
  if (is_in(h.device) || is_in(h.host)) {
    const auto offset = static_cast<std::size_t>(at - (is_in(h.device) ? h.device : h.host));
    std::fprintf(stderr, "simulated CUDA: %s (device %zu, %p)\n", describe(h, at),
                 offset / kDeviceBytes, info->si_addr);
    constexpr int kFrames = 64;
    void* frames[kFrames];
    backtrace_symbols_fd(frames, backtrace(frames, kFrames), STDERR_FILENO);
  }
  if ((h.handler_before.sa_flags & SA_SIGINFO) != 0 && h.handler_before.sa_sigaction != nullptr) {
    h.handler_before.sa_sigaction(number, info, context);
  }
  signal(number, SIG_DFL);
}

Heap& heap() {
  static Heap* const instance = make_heap();
  static const bool handled = [] {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    return sigaction(SIGSEGV, &action, &instance->handler_before) == 0;
  }();
  (void)handled;
  return *instance;
}

char* view(const Heap& h, const char* memory) { return h.host + (memory - h.device); }

/// Allows or forbids what computes in the devices' place, where there are guards.
void allow(const Heap& h, const Block& block, bool access) {
  if (settings().guards) {
    protect(view(h, block.begin), block.pages, access ? PROT_READ | PROT_WRITE : PROT_NONE);
  }
}

/// The first free room of a device with so many bytes, or end().
auto find_room(Heap& h, int device, std::size_t bytes) {
  auto it = h.free.lower_bound(begin_of(h, device));
  while (it != h.free.end() && device_of(it->first) == device && it->second < bytes) {
    ++it;
  }
  return it != h.free.end() && device_of(it->first) == device ? it : h.free.end();
}

/// Joins room with free neighbours of its device.
void give_back(Heap& h, char* begin, std::size_t bytes) {
  const int device = device_of(begin);
  auto next = h.free.lower_bound(begin);
  if (next != h.free.end() && next->first == begin + bytes && device_of(next->first) == device) {
    bytes += next->second;
    next = h.free.erase(next);
  }
  if (next != h.free.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin && device_of(before->first) == device) {
      before->second += bytes;
      return;
    }
  }
  h.free[begin] = bytes;
}

std::map<const char*, std::size_t>& pinned() {
  static auto* const all = new std::map<const char*, std::size_t>();
  return *all;
}

}  // namespace

int device_of(const void* memory) {
  const Heap& h = heap();
  const auto* const at = static_cast<const char*>(memory);
  return at < h.device || at >= h.device + kAllBytes
             ? -1
             : static_cast<int>(static_cast<std::size_t>(at - h.device) / kDeviceBytes);
}

void* host_view(const void* memory) {
  return device_of(memory) < 0 ? const_cast<void*>(memory)
                               : view(heap(), static_cast<const char*>(memory));
}

void* allocate(int device, std::size_t bytes) {
  Heap& h = heap();
  const std::scoped_lock lock(h.mutex);
  if (h.until_failure != 0 && --h.until_failure == 0) {
    h.fails = true;
  }
  const std::size_t pages = round_up(bytes, kPage);
  const bool guarded = settings().guards && h.used.size() < kMostGuarded;
  const std::size_t room = pages + (guarded ? kPage : 0);
  const auto found = find_room(h, device, room);
  if (h.fails || found == h.free.end()) {
    return nullptr;
  }
  const auto [begin, size] = *found;
  h.free.erase(found);
  if (size > room) {
    h.free[begin + room] = size - room;
  }
  char* const memory = guarded ? begin + pages - round_up(bytes, kVector) : begin;
  const Block block{begin, pages, room, bytes};
  h.used[memory] = block;
  h.in_use[device] += pages;
  allow(h, block, true);
  std::memset(view(h, begin), kRubbish, pages);
  return memory;
}

bool release(void* memory) {
  Heap& h = heap();
  const std::scoped_lock lock(h.mutex);
  const auto found = h.used.find(static_cast<char*>(memory));
  if (found == h.used.end()) {
    return false;
  }
  const Block block = found->second;
  h.fails = h.fails && !h.until_freed;
  h.used.erase(found);
  h.in_use[device_of(block.begin)] -= block.pages;
  allow(h, block, false);
  fallocate(h.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, block.begin - h.device,
            static_cast<off_t>(block.pages));
  give_back(h, block.begin, block.room);
  return true;
}

std::size_t bytes_in_use(int device) { return heap().in_use[device]; }

void fail_allocations(unsigned long first, bool until_freed) {
  Heap& h = heap();
  const std::scoped_lock lock(h.mutex);
  h.until_failure = first;
  h.until_freed = until_freed;
  h.fails = false;
}

void pin(const void* memory, std::size_t bytes) {
  const std::scoped_lock lock(heap().mutex);
  pinned()[static_cast<const char*>(memory)] = bytes;
}

void unpin(const void* memory) {
  const std::scoped_lock lock(heap().mutex);
  pinned().erase(static_cast<const char*>(memory));
}

bool is_pinned(const void* memory) {
  const std::scoped_lock lock(heap().mutex);
  const auto* const at = static_cast<const char*>(memory);
  const auto next = pinned().upper_bound(at);
  return next != pinned().begin() && at < std::prev(next)->first + std::prev(next)->second;
}

Snapshot take_snapshot() {
  Heap& h = heap();
  const std::scoped_lock lock(h.mutex);
  Snapshot all;
  for (const auto& [memory, block] : h.used) {
    const char* const from = view(h, memory);
    all.blocks.push_back({memory, std::vector<char>(from, from + block.bytes)});
  }
  return all;
}

void restore(const Snapshot& snapshot) {
  Heap& h = heap();
  const std::scoped_lock lock(h.mutex);
  for (const auto& block : snapshot.blocks) {
    const auto found = h.used.find(static_cast<char*>(block.memory));
    if (found != h.used.end() && found->second.bytes == block.contents.size()) {
      std::memcpy(view(h, found->first), block.contents.data(), block.contents.size());
    }
  }
}

namespace {

void allow_device_code(const Heap& h, int device, int access) {
  char* const begin = begin_of(h, device);
  if (!settings().guards) {
    protect(begin, kDeviceBytes, access);
    return;
  }
  for (auto it = h.used.lower_bound(begin); it != h.used.end(); ++it) {
    if (device_of(it->first) != device) {
      break;
    }
    protect(it->second.begin, it->second.pages, access);
  }
}

}  // namespace

DeviceCode::DeviceCode(int device) : device_(device) {
  Heap& h = heap();
  const std::scoped_lock lock(h.mutex);
  if (h.running[device]++ == 0) {
    allow_device_code(h, device, PROT_READ | PROT_WRITE);
  }
}

DeviceCode::~DeviceCode() {
  Heap& h = heap();
  const std::scoped_lock lock(h.mutex);
  if (--h.running[device_] == 0) {
    allow_device_code(h, device_, PROT_NONE);
  }
}

}  // namespace simulated_cuda
