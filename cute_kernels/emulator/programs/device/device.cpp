// A device "cuda" for CPU builds of torch, whose memory is memory of the host.
//
// Tensors on it are of DeviceType::CUDA, so that all that torch makes of operators (composites, autograd, autocast,
// functorch, fake tensors) works as in a build for CUDA. What is registered for the dispatch key CUDA calls the CPU's
// kernels on the same memory. Python reaches the device by operators of the namespace cute_device, since errors of
// operators are exceptions on both sides.
#include <torch/csrc/utils/device_lazy_init.h>

#include "operators.h"

TORCH_LIBRARY(cute_device, m) {
    // Defined in Python.
    m.def("host_waits(str name, int address, int nbytes) -> ()");
    m.def("worked(str name) -> ()");
    m.def("stands_in(str name) -> bool");
    m.def("order(str what, int stream, int event) -> int");

    m.def("activate(int new_byte, int most_bytes, str[] libraries) -> ()",
        [](int64_t new_byte, int64_t most_bytes, std::vector<std::string> libraries) {
            begin_memory(new_byte, most_bytes, std::move(libraries));
            install_guard();
            in_bad_fork = false;
            active = true;
        });
    // In a process that was forked: whether the one from which it was uses the device.
    m.def("forked(bool is_bad) -> ()", [](bool is_bad) {
        in_bad_fork = is_bad;
        torch::utils::set_requires_device_init(DeviceType::CUDA, true);
    });
    m.def("deactivate() -> ()", [] {
        active = false;
        in_bad_fork = false;
        torch::utils::set_requires_device_init(DeviceType::CUDA, true);  // which raises, as before
    });
    // Whether this thread is one of the program; returns whether it was.
    m.def("enter(bool is_inside) -> bool", [](bool is_inside) { return std::exchange(inside, is_inside); });
    m.def("watch(bool watches) -> ()", [](bool watches) { watched = watches; });
    m.def("take_over() -> ()", [] { take_over("aten::"); });
    m.def("default_generator() -> Generator?", [] { return default_generator(); });
    m.def("stream() -> int", [] { return stream_of_thread; });
    m.def("exchange_stream(int stream) -> int", [](int64_t stream) { return exchange_stream(stream); });

    // Address, bytes and serial number of all memory, one behind the other, in the order in which it was made.
    m.def("memory() -> int[]", [] {
        std::vector<int64_t> found;
        for (const auto& each : allocations())
            found.insert(found.end(), {static_cast<int64_t>(each.address), static_cast<int64_t>(each.nbytes),
                static_cast<int64_t>(each.serial)});
        return found;
    });
    m.def("serial(int address) -> int", [](int64_t address) {
        return static_cast<int64_t>(allocation_at(address).serial);
    });
    // Shape of the first tensor of memory; bytes of an element, 0 if it is not row by row.
    m.def("shape(int address) -> (int[], int)", [](int64_t address) {
        const auto found = allocation_at(address);
        const int64_t size = found.is_contiguous ? static_cast<int64_t>(c10::elementSize(found.dtype)) : 0;
        return std::make_tuple(found.shape, size);
    });
    // Type and shape of the latest tensor at an address that was freed, file and line of its maker.
    m.def("freed(int address) -> (str, int[], str, int)", [](int64_t address) {
        const auto found = freed_at(address);
        const bool known = found.dtype != c10::ScalarType::Undefined;
        const std::string type(known ? c10::getDtypeNames(found.dtype).first : "");
        return std::make_tuple(type, found.shape, found.maker, static_cast<int64_t>(found.line));
    });
    m.def("used() -> (int, int)", [] {
        const auto [used, peak] = used_and_peak();
        return std::make_tuple(static_cast<int64_t>(used), static_cast<int64_t>(peak));
    });
    m.def("reset_peak() -> ()", [] { reset_peak(); });
    m.def("limit(int most_bytes) -> ()", [](int64_t most_bytes) { memory().most = most_bytes; });

    m.def("resize_storage(Storage storage, int nbytes) -> ()", &resize_storage);
    m.def("set_of_one_device(str[] names) -> ()", [](const std::vector<std::string>& names) {
        of_one_device().insert(names.begin(), names.end());
    });

    m.def("begin_graph() -> int", [] { return begin_graph(); });
    m.def("add_generator(int graph, Generator? generator) -> ()",
        [](int64_t graph, std::optional<at::Generator> generator) { graph_of(graph)->add_generator(*generator); });
    m.def("capture_stream(int graph, int stream) -> ()", &capture_stream);
    m.def("end_graph(int graph) -> ()", [](int64_t graph) { end_graph(graph); });
    // Changes contents of before all captures and those that they have left, until it is called again.
    m.def("swap_contents() -> ()", [] { swap_all_contents(); });
    m.def("work_of_graph(int graph, int stream) -> int", [](int64_t graph, int64_t stream) {
        return graph_of(graph)->work[stream];
    });
    m.def("operators_of_graph(int graph) -> int", [](int64_t graph) {
        return static_cast<int64_t>(graph_of(graph)->operators.size());
    });
    m.def("replay_graph(int graph, int first, int last) -> ()",
        [](int64_t graph, int64_t first, int64_t last) { replay_graph(graph, first, last); });
    m.def("free_graph(int graph) -> ()", [](int64_t graph) {
        std::lock_guard<std::mutex> lock(graphs_mutex);
        graphs().erase(graph);
    });
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("copy_", &copy_);
    m.impl("record_stream", [](at::Tensor&, Stream) {});
    m.impl("_foreach_copy_", [](at::TensorList to, at::TensorList from, bool non_blocking) {  // of both devices
        for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], non_blocking);
    });
    // Composites that ask for the device and choose what only builds for CUDA have.
    for (const char* name : {"convolution", "convolution_backward"})
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

namespace {
const bool installed = [] {
    install_device();
    take_over("c10d::");  // collectives of a build without CUDA have no back end for its tensors, and do not look
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&sdp_choice);
    return true;
}();
}  // namespace
