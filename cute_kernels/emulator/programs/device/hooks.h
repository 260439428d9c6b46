// What torch asks of a kind of device: a guard with streams, generators, and the hooks of CUDA.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <mutex>

#include "memory.h"

namespace {

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

thread_local int64_t stream_of_thread = 0;
int64_t exchange_stream(int64_t stream) { return std::exchange(stream_of_thread, stream); }

using Values = std::vector<c10::IValue>;

// Calls a function of Python, whose exceptions pass through the operator to the program.
c10::IValue ask(const char* name, Values arguments, bool answers = false) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
    return answers ? arguments.back() : c10::IValue();
}

// The order of streams is kept in Python, events by numbers.
int64_t order(const char* what, int64_t stream, const void* event = nullptr) {
    if (!active) return 0;
    return ask("cute_device::order", {std::string(what), stream, reinterpret_cast<int64_t>(event)}, true).toInt();
}

// Numbers of events, those of destroyed ones again: Python need not be told, which a destructor could not do.
struct Numbers {
    std::mutex lock;
    std::vector<void*> left;
    int64_t count = 0;
    void* take() {
        const std::lock_guard guard(lock);
        if (left.empty()) return reinterpret_cast<void*>(++count);
        void* number = left.back();
        left.pop_back();
        return number;
    }
    void give(void* number) {
        const std::lock_guard guard(lock);
        left.push_back(number);
    }
} events;

// Everything is complete when a call returns, as far as torch is concerned.
struct Guard final : c10::impl::DeviceGuardImplInterface {
    DeviceType type() const override { return DeviceType::CUDA; }
    Device exchangeDevice(Device to) const override { check_index(to); return kDevice; }
    Device getDevice() const override { return kDevice; }
    void setDevice(Device to) const override { check_index(to); }
    void uncheckedSetDevice(Device) const noexcept override {}
    Stream getStream(Device) const override { return Stream(Stream::UNSAFE, kDevice, stream_of_thread); }
    Stream getDefaultStream(Device) const override { return Stream(Stream::UNSAFE, kDevice, 0); }
    Stream getNewStream(Device, int) const override { return Stream(Stream::UNSAFE, kDevice, order("create", 0)); }
    Stream getStreamFromGlobalPool(Device, bool) const override { return getNewStream(kDevice, 0); }
    Stream exchangeStream(Stream to) const override {
        return Stream(Stream::UNSAFE, kDevice, exchange_stream(to.id()));
    }
    DeviceIndex deviceCount() const noexcept override { return is_there() ? 1 : 0; }
    void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
        if (!*event) *event = events.take();
        order("record", stream.id(), *event);
    }
    void block(void* event, const Stream& stream) const override { order("block", stream.id(), event); }
    bool queryEvent(void* event) const override { return order("synchronize", 0, event) == 0; }
    void destroyEvent(void* event, DeviceIndex) const noexcept override { events.give(event); }
    bool isStreamCapturing(const Stream& stream) const { return order("is capturing", stream.id()) != 0; }  // of 2.13
    bool queryStream(const Stream& stream) const override { return order("synchronize", stream.id()) == 0; }
    void synchronizeStream(const Stream& stream) const override { order("synchronize", stream.id()); }
    void synchronizeEvent(void* event) const override { order("synchronize", 0, event); }
    double elapsedTime(void* first, void* second, DeviceIndex) const override {
        return 1e-6 * static_cast<double>(order("elapsed", reinterpret_cast<int64_t>(first), second));
    }
    void synchronizeDevice(DeviceIndex) const override { order("synchronize device", 0); }
};

// A generator that says it is of the device; the CPU's kernels draw from the one inside.
struct CudaGenerator final : c10::GeneratorImpl {
    c10::intrusive_ptr<at::CPUGeneratorImpl> host;
    explicit CudaGenerator(c10::intrusive_ptr<at::CPUGeneratorImpl> of)
        : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::CUDA)), host(std::move(of)) {}
    void set_current_seed(uint64_t seed) override { host->set_current_seed(seed); }
    uint64_t current_seed() const override { return host->current_seed(); }
    uint64_t seed() override { return host->seed(); }
    void set_offset(uint64_t) override {}
    uint64_t get_offset() const override { return 0; }
    void set_state(const c10::TensorImpl& state) override { host->set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host->get_state(); }
    CudaGenerator* clone_impl() const override {
        return new CudaGenerator(c10::dynamic_intrusive_pointer_cast<at::CPUGeneratorImpl>(host->GeneratorImpl::clone()));
    }
};

at::Generator new_generator() {
    return at::make_generator<CudaGenerator>(c10::make_intrusive<at::CPUGeneratorImpl>(c10::default_rng_seed_val));
}

const at::Generator& default_generator() {
    static at::Generator* it = new at::Generator(new_generator());
    return *it;
}

struct Hooks final : at::CUDAHooksInterface {
    void init() const override {}
    bool isBuilt() const override { return is_there(); }
    bool isAvailable() const override { return active; }
    bool hasPrimaryContext(DeviceIndex) const override { return active; }
    bool hasCUDA() const override { return is_there(); }
    int getNumGPUs() const override { return active ? 1 : 0; }
    DeviceIndex deviceCount() const override { return active ? 1 : 0; }
    DeviceIndex current_device() const override { return 0; }
    DeviceIndex getCurrentDevice() const override { return 0; }
    void setCurrentDevice(DeviceIndex to) const override { check_index({DeviceType::CUDA, to}); }
    DeviceIndex exchangeDevice(DeviceIndex to) const override { check_index({DeviceType::CUDA, to}); return 0; }
    DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
    void deviceSynchronize(DeviceIndex) const override {}
    const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
    at::Generator getNewGenerator(DeviceIndex) const override { check_device(kDevice); return new_generator(); }
    at::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
    at::Allocator* getCUDADeviceAllocator() const override { return device_memory(); }
    bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
    Device getDeviceFromPtr(void*) const override { return kDevice; }
};

at::Generator host_generator(const at::Generator& generator) {
    auto* inside = dynamic_cast<CudaGenerator*>(generator.unsafeGetGeneratorImpl());
    TORCH_CHECK(inside, "Expected a 'cuda' device type for generator but found 'cpu'");
    return at::Generator(inside->host);
}

// FakeTensorMode, where there seems to be no GPU, puts a guard that does nothing in its place: told with every program.
void install_guard() {
    static Guard guard;
    c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
}

// torch asks once for the hooks of CUDA, and keeps what it gets. Where it has asked before this library was loaded,
// the object that it made has no members either, and becomes one of these hooks.
void install_device() {
    install_guard();
    c10::SetAllocator(DeviceType::CUDA, device_memory(), 10);
    auto* registry = at::CUDAHooksRegistry();
    if (!registry->Has("CUDAHooks"))
        registry->Register("CUDAHooks",
            [](at::CUDAHooksArgs) { return std::unique_ptr<at::CUDAHooksInterface>(new Hooks); });
    auto& hooks = at::detail::getCUDAHooks();
    if (dynamic_cast<const Hooks*>(&hooks)) return;
    static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
    new (const_cast<at::CUDAHooksInterface*>(&hooks)) Hooks();
}

}  // namespace
