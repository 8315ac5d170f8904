// The pretend device as torch meets it: hooks, a guard with streams and events, a generator.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace pretend {
namespace {

thread_local int64_t stream_now = 0;
int64_t next_stream = 0;

// Random numbers of the device come from a generator of the CPU that it holds.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(at::Generator held)
      : GeneratorImpl(DEVICE, c10::DispatchKeySet(c10::DispatchKey::CUDA)), held(std::move(held)) {}
  void set_current_seed(uint64_t seed) override { held.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return held.current_seed(); }
  uint64_t seed() override { return held.seed(); }
  void set_state(const c10::TensorImpl& state) override { held.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return held.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(held.clone()); }
  at::Generator held;
};

at::Generator new_generator() { return at::make_generator<Generator>(at::detail::createCPUGenerator()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  static c10::Stream stream(int64_t number) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, number); }
  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(stream_now); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(++next_stream); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++next_stream); }
  c10::Stream exchangeStream(c10::Stream given) const override {
    auto before = stream(stream_now);
    stream_now = given.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    static char any;
    if (*event == nullptr) *event = &any;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  bool isStreamCapturing(const c10::Stream&) const override { return is_recording(); }
  void synchronizeStream(const c10::Stream&) const override { synchronize("stream"); }
  void synchronizeEvent(void*) const override { synchronize("event"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize("device"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

int64_t current_stream() { return stream_now; }
void set_current_stream(int64_t stream) { stream_now = stream; }

at::Generator held_generator(const at::Generator& generator) {
  auto* ours = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  return ours ? ours->held : generator;
}

TORCH_LIBRARY_FRAGMENT(pretend_gpu, m) {
  m.def("current_stream() -> int", [] { return stream_now; });
  m.def("set_stream(int number) -> ()", [](int64_t number) { stream_now = number; });
  m.def("new_stream() -> int", [] { return ++next_stream; });
}

}  // namespace pretend

namespace at {  // the registry asks for a class of this name here

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return pretend::DEVICE; }
  bool isPinnedPtr(const void* place) const override { return pretend::is_pinned(place); }
  Allocator* getPinnedMemoryAllocator() const override { return pretend::pinned_allocator(); }
  Allocator* getCUDADeviceAllocator() const override { return pretend::device_allocator(); }
  void deviceSynchronize(DeviceIndex) const override { pretend::synchronize("device"); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    static const at::Generator generator = pretend::new_generator();
    return generator;
  }
  at::Generator getNewGenerator(DeviceIndex) const override { return pretend::new_generator(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
