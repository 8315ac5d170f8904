// What the parts of the pretend device share: its memory, what is counted, and recordings.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace pretend {

const c10::Device DEVICE{c10::DeviceType::CUDA, 0};

// --- memory (memory.cpp)

struct Block {
  int64_t id;
  int64_t bytes;
  int64_t pool;  // -1 outside of the pools of recordings
};

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* place);
// The block that a place lies in; its id is 0 where there is none.
Block block_at(const void* place);
void open_pool(int64_t pool);
void close_pool(int64_t pool);
// Memory that was first used while this recording was made is filled with what is no number.
void forget_recorded(int64_t pool);
void count_operation(const std::string& name);

// --- counting (counting.cpp)

void count(const std::string& kind, const std::string& name, int64_t by = 1);
void note_live(int64_t live);
// The host waits for the device; an error where a recording is made.
void synchronize(const std::string& why);
std::string scopes();
bool is_in_scope(const std::string& name);

// --- streams (hooks.cpp) and recordings (recording.cpp)

int64_t current_stream();
void set_current_stream(int64_t stream);
bool is_recording();
int64_t recording_pool();
[[noreturn]] void refuse_in_recording(const std::string& what);
void keep_before(const c10::OperatorHandle& op, const torch::jit::Stack& given);
void keep_operation(
    const c10::OperatorHandle& op, const torch::jit::Stack& given, std::vector<std::pair<size_t, at::Tensor>> made);

// --- kernels (kernels.cpp)

// A tensor on the CPU in the memory of one on the device.
at::Tensor on_cpu(const at::Tensor& tensor);
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack, bool checks_devices);

}  // namespace pretend
