// Memory of the pretend device: host memory of which every byte is counted, with a limit and failures on demand.
#include "device.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace pretend {
namespace {

constexpr int64_t ROUNDED = 512;
constexpr int64_t FILLED_UP_TO = 64 << 20;  // larger buffers stay untouched: they may never be used as a whole
constexpr int GARBAGE = 0xFF;  // no number in any floating type, -1 as an integer

std::recursive_mutex memory_lock;
std::map<uintptr_t, Block> blocks;
std::map<int64_t, std::multimap<int64_t, std::pair<void*, int64_t>>> spare;  // by pool: bytes -> place, id
std::map<int64_t, std::vector<void*>> touched;
std::map<int64_t, int> users;
std::map<uintptr_t, int64_t> pinned;
int64_t total = 80ll << 30, live = 0, peak = 0, reserved = 0, peak_reserved = 0, next_id = 1;

struct Failure {
  std::string kind;  // "allocation", "operation"
  std::string name;  // of the operation or of the scope, or empty
  int64_t at = 0;    // the how-many-eth fails, once
};
std::vector<Failure> failures;

[[noreturn]] void out_of_memory(int64_t bytes, const char* why) {
  auto gib = [](int64_t count) { return c10::str(static_cast<double>(count) / (1 << 30), " GiB"); };
  count("out_of_memory", scopes());
  fprintf(stderr, "pretend GPU: out of memory in %s\n", scopes().c_str());
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", static_cast<double>(bytes) / (1 << 20),
      " MiB. GPU 0 has a total capacity of ", gib(total), " of which ", gib(total - live),
      " is free. Of the allocated memory ", gib(live), " is allocated by PyTorch, and ", gib(reserved - live),
      " is reserved by PyTorch but unallocated. (", why, ")");
}

bool is_due(const char* kind, const std::string& name) {
  bool due = false;
  for (auto& failure : failures)
    if (failure.kind == kind && failure.at > 0 && (failure.name.empty() || failure.name == name || is_in_scope(failure.name)))
      due = (--failure.at == 0) || due;
  return due;
}

void release(void* place) {
  std::lock_guard<std::recursive_mutex> held(memory_lock);
  auto found = blocks.find(reinterpret_cast<uintptr_t>(place));
  if (found == blocks.end()) return;
  Block block = found->second;
  live -= block.bytes;
  note_live(live);
  if (block.pool >= 0) {
    spare[block.pool].emplace(block.bytes, std::make_pair(place, block.id));
    return;
  }
  blocks.erase(found);
  std::free(place);
}

void* take(int64_t bytes) {
  const int64_t pool = recording_pool();
  if (is_due("allocation", "")) out_of_memory(bytes, "a failure that was asked for");
  if (pool >= 0) {
    auto& free_ones = spare[pool];
    auto found = free_ones.lower_bound(bytes);
    if (found != free_ones.end() && found->first <= 2 * bytes + (1 << 20)) {
      void* place = found->second.first;
      live += found->first;
      free_ones.erase(found);
      touched[pool].push_back(place);
      return place;
    }
  }
  int64_t idle = 0;
  for (auto& [_, blocks_of_pool] : spare)
    for (auto& [size, __] : blocks_of_pool) idle += size;
  if (live + idle + bytes > total) out_of_memory(bytes, "the pretend device is full");
  void* place = nullptr;
  if (posix_memalign(&place, ROUNDED, bytes) != 0) out_of_memory(bytes, "the host has no memory left");
  if (bytes <= FILLED_UP_TO) std::memset(place, GARBAGE, bytes);
  blocks[reinterpret_cast<uintptr_t>(place)] = {next_id++, bytes, pool};
  if (pool >= 0) touched[pool].push_back(place);
  live += bytes;
  reserved = std::max(reserved, live + idle);
  return place;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t asked) override {
    if (asked == 0) return {nullptr, nullptr, &release, DEVICE};
    std::lock_guard<std::recursive_mutex> held(memory_lock);
    void* place = take((static_cast<int64_t>(asked) + ROUNDED - 1) / ROUNDED * ROUNDED);
    peak = std::max(peak, live);
    peak_reserved = std::max(peak_reserved, reserved);
    count("allocations", "");
    note_live(live);
    return {place, place, &release, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

void release_pinned(void* place) {
  std::lock_guard<std::recursive_mutex> held(memory_lock);
  pinned.erase(reinterpret_cast<uintptr_t>(place));
  std::free(place);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* place = nullptr;
    if (bytes && posix_memalign(&place, 64, bytes) != 0) out_of_memory(bytes, "the host has no memory left");
    std::lock_guard<std::recursive_mutex> held(memory_lock);
    if (place) pinned[reinterpret_cast<uintptr_t>(place)] = static_cast<int64_t>(bytes);
    return {place, place, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

DeviceAllocator device_memory;
PinnedAllocator pinned_memory;
REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &device_memory);

template <class Map, class Size>
typename Map::const_iterator around(const Map& map, const void* place, Size size) {
  const auto at = reinterpret_cast<uintptr_t>(place);
  auto found = map.upper_bound(at);
  if (found == map.begin()) return map.end();
  --found;
  return at < found->first + size(found->second) ? found : map.end();
}

}  // namespace

c10::Allocator* device_allocator() { return &device_memory; }
c10::Allocator* pinned_allocator() { return &pinned_memory; }

bool is_pinned(const void* place) {
  std::lock_guard<std::recursive_mutex> held(memory_lock);
  return around(pinned, place, [](int64_t bytes) { return bytes; }) != pinned.end();
}

Block block_at(const void* place) {
  std::lock_guard<std::recursive_mutex> held(memory_lock);
  auto found = around(blocks, place, [](const Block& block) { return block.bytes; });
  return found == blocks.end() ? Block{0, 0, -1} : found->second;
}

void open_pool(int64_t pool) {
  std::lock_guard<std::recursive_mutex> held(memory_lock);
  users[pool]++;
  touched[pool].clear();
}

void close_pool(int64_t pool) {
  std::lock_guard<std::recursive_mutex> held(memory_lock);
  if (--users[pool] > 0) return;
  for (auto& [bytes, one] : spare[pool]) {
    blocks.erase(reinterpret_cast<uintptr_t>(one.first));
    std::free(one.first);
  }
  spare.erase(pool);
  users.erase(pool);
  touched.erase(pool);
  for (auto& [_, block] : blocks)
    if (block.pool == pool) block.pool = -1;
}

void forget_recorded(int64_t pool) {
  std::lock_guard<std::recursive_mutex> held(memory_lock);
  for (void* place : touched[pool]) {
    auto found = blocks.find(reinterpret_cast<uintptr_t>(place));
    if (found != blocks.end()) std::memset(place, GARBAGE, found->second.bytes);
  }
  touched[pool].clear();
}

void count_operation(const std::string& name) {
  std::lock_guard<std::recursive_mutex> held(memory_lock);
  if (!failures.empty() && is_due("operation", name)) out_of_memory(0, "a failure that was asked for");
}

TORCH_LIBRARY_FRAGMENT(pretend_gpu, m) {
  m.def("memory() -> int[]", [] {
    std::lock_guard<std::recursive_mutex> held(memory_lock);
    return std::vector<int64_t>{total, live, peak, reserved, peak_reserved};
  });
  m.def("set_total(int bytes) -> ()", [](int64_t bytes) { total = bytes; });
  m.def("reset_peak() -> ()", [] { peak = live, peak_reserved = reserved; });
  m.def("empty_cache() -> ()", [] {
    if (is_recording()) refuse_in_recording("empty_cache()");
    std::lock_guard<std::recursive_mutex> held(memory_lock);
    int64_t idle = 0;
    for (auto& [_, blocks_of_pool] : spare)
      for (auto& [size, __] : blocks_of_pool) idle += size;
    reserved = live + idle;
  });
  m.def("fail(str kind, str name, int at) -> ()", [](std::string kind, std::string name, int64_t at) {
    std::lock_guard<std::recursive_mutex> held(memory_lock);
    failures.push_back({kind, name, at});
  });
  m.def("fail_no_more() -> ()", [] {
    std::lock_guard<std::recursive_mutex> held(memory_lock);
    failures.clear();
  });
}

}  // namespace pretend
