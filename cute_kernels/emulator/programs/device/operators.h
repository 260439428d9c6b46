// Operators on device tensors: a fallback that calls the kernel of the CPU on tensors with the same memory.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include <shared_mutex>

#include "graphs.h"

namespace {

// Whether Python wants to know of each operator that changes or makes device memory.
std::atomic<bool> watched{false};

// The host waits for the current stream, in which an operator reads a tensor, or none.
void host_waits(const std::string& name, const at::Tensor* read) {
    if (!active) return;
    const bool known = read && read->is_contiguous();
    const int64_t address = known ? reinterpret_cast<int64_t>(read->const_data_ptr()) : 0;
    ask("cute_device::host_waits", {name, address, static_cast<int64_t>(known ? read->nbytes() : 0)});
}

// Device memory for a storage of the CPU, which becomes that of a device storage.
struct ResizedMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        void* pointer = device_memory()->allocate(nbytes).release_context();
        return {pointer, pointer, &release, Device(DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
} resized_memory;

// Pairs of a device storage and one of the CPU with the same memory, for one call.
struct Storages {
    std::vector<std::pair<c10::Storage, c10::Storage>> pairs;
    bool made_memory = false;

    c10::Storage lower(const c10::Storage& device) {
        for (auto& [known, host] : pairs)
            if (known.is_alias_of(device)) return host;
        auto* held = new c10::Storage(device);  // the memory lives as long as a kernel keeps the CPU's storage
        c10::DataPtr data(const_cast<void*>(device.data()), held,
            [](void* p) { delete static_cast<c10::Storage*>(p); }, Device(DeviceType::CPU));
        return pairs.emplace_back(device, c10::Storage(c10::Storage::use_byte_size_t(), device.nbytes(),
            std::move(data), &resized_memory, true)).second;
    }

    // The device storage of one that a kernel left, which may be new memory; that is copied.
    c10::Storage raise(const c10::Storage& host) {
        for (auto& [device, known] : pairs)
            if (known.is_alias_of(host)) return device;
        c10::Storage copy(c10::Storage::use_byte_size_t(), host.nbytes(), device_memory(), true);
        if (host.nbytes() && host.data()) memcpy(copy.mutable_data(), host.data(), host.nbytes());
        else if (host.nbytes()) memset(copy.mutable_data(), 0, host.nbytes());  // a zero tensor without memory
        made_memory = true;
        return pairs.emplace_back(std::move(copy), host).first;
    }

    void resize() {  // where a kernel did
        for (auto& [device, host] : pairs) {
            if (host.nbytes() == device.nbytes() && host.data() == device.data()) continue;
            const size_t nbytes = host.nbytes();
            auto data = host.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, Device(DeviceType::CPU)));
            if (data.get_deleter() != &release) continue;  // it only says that it is smaller
            void* pointer = data.release_context();
            device.unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(pointer, pointer, &release, kDevice));
            device.unsafeGetStorageImpl()->set_nbytes(nbytes);
        }
    }
};

at::Tensor on_host(const at::Tensor& tensor, Storages& storages) {
    return relabelled(tensor, storages.lower(tensor.storage()), c10::DispatchKey::CPU);
}

const std::unordered_set<std::string> kMixes = {  // operators that take tensors of both devices
    "aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index_put",
    "aten::_index_put_impl_", "aten::_to_copy", "aten::_copy_from", "aten::_copy_from_and_resize"};
const std::unordered_map<std::string, const char*> kReads = {  // for whose result the host waits, as programs call them
    {"aten::_local_scalar_dense", "item"}, {"aten::nonzero", "nonzero"}, {"aten::masked_select", "masked_select"},
    {"aten::equal", "equal"}, {"aten::is_nonzero", "is_nonzero"}, {"aten::bincount", "bincount"},
    {"aten::_unique", "unique"}, {"aten::_unique2", "unique"}, {"aten::unique_dim", "unique"},
    {"aten::unique_consecutive", "unique_consecutive"}, {"aten::unique_dim_consecutive", "unique_consecutive"}};

// Names of operators all of whose tensors, also those of one element, must be on the device.
std::unordered_set<std::string>& of_one_device() {
    static auto* it = new std::unordered_set<std::string>;
    return *it;
}

struct Facts {  // of an operator, that take time to find
    c10::OperatorName name{"", ""};
    std::string text{};  // its name as torch writes it
    const char* reads = nullptr;
    bool mixes = false, indexes = false, puts = false, refuses_scalars = false, reduces = false;
    bool writes = false, is_of_torch = false;
    int device = -1, generator = -1, pin = -1, half_to_float = -1, input_dtype = -1;
};

const Facts* found_facts(const c10::OperatorHandle& op) {
    auto* made = new Facts;
    const auto& schema = op.schema();
    made->name = op.operator_name();
    made->text = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
    made->is_of_torch = schema.name().rfind("aten::", 0) == 0 || schema.name().rfind("prims::", 0) == 0;
    made->mixes = kMixes.count(schema.name()) || schema.name().rfind("aten::_foreach", 0) == 0;
    made->refuses_scalars = of_one_device().count(made->text);
    made->puts = schema.name().find("index_put") != std::string::npos && made->mixes;
    made->indexes = schema.name().find("index") != std::string::npos && made->mixes;
    made->writes = schema.is_mutable();
    if (auto read = kReads.find(schema.name()); read != kReads.end()) made->reads = read->second;
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
        const auto& name = schema.arguments()[i].name();
        if (name == "device") made->device = static_cast<int>(i);
        if (name == "generator") made->generator = static_cast<int>(i);
        if (name == "pin_memory") made->pin = static_cast<int>(i);
        made->reduces |= name == "reduction" && !schema.overload_name().empty();
        if (name == "half_to_float") made->half_to_float = static_cast<int>(i);
        if (name == "input_dtype") made->input_dtype = static_cast<int>(i);
    }
    return made;
}

const Facts& facts(const c10::OperatorHandle& op) {
    static std::shared_mutex mutex;
    static auto* known = new std::unordered_map<const void*, const Facts*>;  // what is replaced may still be in use
    {
        std::shared_lock<std::shared_mutex> lock(mutex);
        auto found = known->find(&op.schema());
        if (found != known->end() && found->second->name == op.operator_name()) return *found->second;
    }
    const Facts* made = found_facts(op);
    std::unique_lock<std::shared_mutex> lock(mutex);
    (*known)[&op.schema()] = made;
    return *made;
}

bool is_mask(const std::optional<at::Tensor>& index) {
    return index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
}

// The call of one operator on the CPU.
struct Call {
    const Facts& what;
    std::vector<std::pair<at::Tensor, at::Tensor>> views{};  // device tensor, what stands for it
    Storages storages{};
    bool counts_places = what.indexes;
    bool has_host = false, has_generator = false;

    at::Tensor lower(const at::Tensor& tensor) {
        if (!is_device_tensor(tensor)) {
            TORCH_CHECK_NOT_IMPLEMENTED(!tensor.defined() || !tensor.is_cuda(), what.text, ": a tensor of layout ",
                tensor.layout(), " on the emulated device");
            has_host |= tensor.defined() && tensor.is_cpu() && (tensor.dim() > 0 || what.refuses_scalars);
            return tensor;
        }
        for (auto& [device, host] : views)
            if (device.is_same(tensor)) return host;
        if (what.reads) host_waits(what.reads, &tensor);
        views.emplace_back(tensor, on_host(tensor, storages));
        return views.back().second;
    }

    c10::IValue lower(const c10::IValue& value) {
        if (value.isStorage() && value.toStorage().device_type() == DeviceType::CUDA)
            return storages.lower(value.toStorage());
        if (value.isGenerator()) {
            has_generator = true;
            if (const auto graph = capturing()) graph->check_generator(value.toGenerator());
            return host_generator(value.toGenerator());
        }
        if (counts_places && value.isOptionalTensorList())  // of masks
            for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
                if (is_mask(each)) host_waits("index of a mask", is_device_tensor(*each) ? &*each : nullptr);
        return mapped_tensors(value, [this](const at::Tensor& tensor) { return lower(tensor); });
    }

    void update() {  // what a kernel did to its arguments
        storages.resize();
        for (auto& [device, host] : views) {
            c10::Storage storage = storages.raise(host.storage());
            auto* to = device.unsafeGetTensorImpl();
            if (!storage.is_alias_of(to->storage())) to->set_storage_keep_dtype(storage);
            if (host.sizes() != to->sizes() || host.strides() != to->strides() ||
                host.storage_offset() != to->storage_offset())
                to->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
        }
    }

    at::Tensor raise(const at::Tensor& result) {
        for (auto& [device, host] : views)
            if (host.is_same(result)) return device;
        if (!result.defined() || !result.device().is_cpu()) return result;
        TORCH_CHECK_NOT_IMPLEMENTED(result.layout() == c10::kStrided, what.text, ": a result of layout ",
            result.layout(), " on the emulated device");
        const size_t before = storages.pairs.size();
        const auto storage = storages.raise(result.storage());
        const at::Tensor* view_of = nullptr;
        for (const auto& [device, host] : views)
            if (!view_of && device.storage().is_alias_of(storage)) view_of = &device;
        auto made = relabelled(result, storage, c10::DispatchKey::CUDA, view_of);
        if (storages.pairs.size() > before) describe_memory(made);
        return made;
    }
};

// Whether it puts one element of the host where one mask says, which torch does by masked_fill_: nothing is counted.
bool is_filled_by_mask(const Facts& what, const c10::IValue* arguments) {
    if (!what.puts || arguments[3].toBool()) return false;
    const auto& value = arguments[2].toTensor();
    int masks = 0;
    for (const std::optional<at::Tensor>& each : arguments[1].toOptionalTensorVector()) {
        if (each && each->defined() && !is_mask(each)) return false;
        masks += is_mask(each);
    }
    return masks == 1 && value.is_cpu() && value.numel() == 1;
}

bool has_kernel_for_host(const c10::OperatorHandle& op, const Facts& what) {
    if (what.is_of_torch) return true;
    if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) return false;
    return ask("cute_device::stands_in", {what.text}, true).toBool();
}

// Prepares arguments that are no tensors; returns whether the result is one of the host.
bool place(const Facts& what, c10::IValue* arguments, bool has_generator_alone) {
    bool to_host = what.device >= 0 && arguments[what.device].isNone() && has_generator_alone;
    if (what.device >= 0 && !arguments[what.device].isNone()) {
        auto& device = arguments[what.device];
        to_host = device.toDevice().is_cpu();
        if (device.toDevice().is_cuda()) {
            check_device(device.toDevice());
            device = Device(DeviceType::CPU);
        }
    }
    if (what.generator >= 0 && arguments[what.generator].isNone())
        arguments[what.generator] = host_generator(default_generator());
    if (what.pin >= 0 && !to_host) arguments[what.pin] = c10::IValue();
    return to_host;
}

// Softmax of half precision may have a result of float32, and its derivative one of half, which the CPU's have not.
// Returns the tensor for the result where it has another type than the kernel's.
at::Tensor widen(const Facts& what, c10::IValue* arguments, size_t count) {
    if (what.half_to_float >= 0 && arguments[what.half_to_float].toBool()) {
        arguments[0] = arguments[0].toTensor().to(at::kFloat);
        arguments[what.half_to_float] = false;
    }
    if (what.input_dtype < 0 || !arguments[0].isTensor() || !arguments[count - 1].isTensor()) return {};
    const auto given = arguments[0].toTensor().scalar_type();
    if (arguments[what.input_dtype].toScalarType() == given) return {};
    const at::Tensor result = arguments[count - 1].toTensor();
    arguments[what.input_dtype] = given;
    arguments[count - 1] = at::empty_like(arguments[0].toTensor());
    return result;
}

struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
};

// torch makes the result of a loss as large as its tensors are and then of one element, of which the kernel of the CPU
// for a result that is given warns.
void call_on_host(const c10::OperatorHandle& op, const Facts& what, torch::jit::Stack* stack) {
    Silent silent;
    std::optional<c10::WarningUtils::WarningHandlerGuard> guard;
    if (what.reduces) guard.emplace(&silent);
    op.callBoxed(stack);
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    check_fork();
    const Facts& what = facts(op);
    TORCH_CHECK_NOT_IMPLEMENTED(has_kernel_for_host(op, what), "Could not run '", what.text,
        "' with arguments from the 'CUDA' backend. It is only available for these backends: [CPU]");
    Call call{what};
    const size_t count = op.schema().arguments().size(), first = stack->size() - count;
    c10::IValue* arguments = stack->data() + first;
    const auto graph = capturing();
    const BesideCaptures beside(graph != nullptr);
    Values noted;
    if (graph) {
        keep_contents(*graph, op, c10::ArrayRef<c10::IValue>(arguments, count));
        noted = aliases(c10::ArrayRef<c10::IValue>(arguments, count));
    }
    if (is_filled_by_mask(what, arguments)) call.counts_places = false;
    for (size_t i = 0; i < count; ++i) {
        const auto* info = op.schema().arguments()[i].alias_info();
        if (info && info->isWrite() && arguments[i].isTensor()) call.has_host |= arguments[i].toTensor().is_cpu();
        arguments[i] = call.lower(arguments[i]);
    }
    TORCH_CHECK(what.mixes || !call.has_host || call.views.empty(),
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (in ",
        what.text, ")");
    const bool to_host = place(what, arguments, call.has_generator && call.views.empty());
    TORCH_CHECK(!call.has_generator || !(to_host || (what.device < 0 && call.views.empty())),
        "Expected a 'cpu' device type for generator but found 'cuda'");
    if (to_host && !call.views.empty()) host_waits("copy to the host", &call.views[0].first);
    const at::Tensor result = widen(what, arguments, count);
    call_on_host(op, what, stack);
    if (result.defined()) stack->back() = result.copy_(stack->back().toTensor());
    call.update();
    if (to_host) return;
    const size_t results = op.schema().returns().size(), start = stack->size() - results;
    for (size_t i = start; i < start + results; ++i)
        (*stack)[i] = mapped_tensors((*stack)[i], [&](const at::Tensor& each) { return call.raise(each); });
    if (graph) graph->add({op, std::move(noted), aliases(c10::ArrayRef<c10::IValue>(stack->data() + start, results))});
    if (watched && (what.writes || call.storages.made_memory)) ask("cute_device::worked", {what.text});
}

// Other memory with as much of the contents as there is room for, as ``UntypedStorage.resize_`` makes.
void resize_storage(const c10::Storage& storage, int64_t nbytes) {
    auto made = device_memory()->allocate(nbytes);
    const auto kept = std::min<size_t>(nbytes, storage.nbytes());
    if (kept) memcpy(made.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(made));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
}

at::Tensor noted(at::Tensor made) {
    describe_memory(made);
    if (const auto graph = capturing()) graph->kept.push_back(made.storage());
    return made;
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
    check_device(device.value_or(kDevice));
    return noted(at::detail::empty_generic(size, device_memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
        c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
    check_device(device.value_or(kDevice));
    return noted(at::detail::empty_strided_generic(size, stride, device_memory(),
        c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype)));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
    check_fork();
    if (self.is_cuda() != from.is_cuda() && !non_blocking)
        host_waits(self.is_cuda() ? "copy to the device" : "copy to the host", from.is_cuda() ? &from : nullptr);
    const auto graph = capturing();
    const BesideCaptures beside(graph != nullptr);
    if (graph) {
        static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
        const Values arguments{self, from, non_blocking};
        keep_contents(*graph, op, arguments);
        graph->add({op, aliases(arguments), {}});
    }
    Storages storages;
    at::Tensor to = self.is_cuda() ? on_host(self, storages) : self;
    to.copy_(from.is_cuda() ? on_host(from, storages) : from, non_blocking);
    if (watched && self.is_cuda()) ask("cute_device::worked", {std::string("copy_")});
    return self;
}

// The fallback takes the place of torch's own kernels for CUDA, for good.
void take_over(const char* space) {
    Silent silent;  // that it does
    const c10::WarningUtils::WarningHandlerGuard guard(&silent);
    const std::unordered_set<std::string> own = {"aten::empty", "aten::empty_strided", "aten::copy_",
        "aten::record_stream"};
    auto& dispatcher = c10::Dispatcher::singleton();
    static auto* kept = new std::vector<c10::RegistrationHandleRAII>;
    for (const auto& name : dispatcher.getAllOpNames()) {
        const auto op = dispatcher.findOp(name);
        if (name.name.rfind(space, 0) != 0 || !op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) ||
            own.count(name.name) || !op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU))
            continue;
        kept->push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA,
            c10::KernelFunction::makeFromBoxedFunction<&run_on_host>(), std::nullopt, nullptr, "cute_device"));
    }
}

int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
    bool, std::optional<double>, bool) {
    return 0;  // of the kinds, the one that is made of other operators
}

}  // namespace
