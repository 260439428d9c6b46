// Operators of torch that a CUDA graph holds: noted in streams that are captured, and run again by each replay.
//
// A capture on a GPU runs nothing. Here the operators do run, for the shapes of their results; memory that was there
// before the capture has its contents back when it ends, and while work runs that is not captured.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>

#include "hooks.h"

namespace {

// A tensor with the contents of another and another storage; as a view of a tensor it keeps what that is for autograd,
// also in inference mode.
at::Tensor relabelled(const at::Tensor& from, c10::Storage storage, c10::DispatchKey key,
    const at::Tensor* view_of = nullptr) {
    using c10::DispatchKey;
    const auto other = c10::DispatchKeySet({DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor,
        DispatchKey::Python, DispatchKey::PythonTLSSnapshot});
    auto made = view_of
        ? at::detail::make_tensor<c10::TensorImpl>(
              c10::TensorImpl::VIEW, std::move(storage), view_of->key_set() - other, from.dtype())
        : at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), from.dtype());
    auto* to = made.unsafeGetTensorImpl();
    to->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
    if (from.is_conj()) to->_set_conj(true);
    if (from.is_neg()) to->_set_neg(true);
    if (from.unsafeGetTensorImpl()->is_wrapped_number()) to->set_wrapped_number(true);
    return made;
}

bool is_device_tensor(const at::Tensor& tensor) {
    return tensor.defined() && tensor.is_cuda() && tensor.layout() == c10::kStrided;
}

// A value with another tensor for each of its tensors.
template <class Function>
c10::IValue mapped_tensors(const c10::IValue& value, const Function& function) {
    if (value.isTensor()) return function(value.toTensor());
    if (value.isTensorList()) {
        auto list = value.toTensorVector();
        for (auto& each : list) each = function(each);
        return c10::List<at::Tensor>(list);
    }
    if (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList()) {
        c10::impl::GenericList list(value.toList().elementType());
        for (const auto& each : value.toListRef()) list.push_back(mapped_tensors(each, function));
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
            list.push_back(each.has_value() ? std::optional<at::Tensor>(function(*each)) : std::nullopt);
        return list;
    }
    return value;
}

// The same memory, whatever a program makes later of the tensor: its shape, its data.
at::Tensor alias(const at::Tensor& tensor) {
    return is_device_tensor(tensor) ? relabelled(tensor, tensor.storage(), c10::DispatchKey::CUDA) : tensor;
}

Values aliases(c10::ArrayRef<c10::IValue> values) {
    Values made;
    for (const auto& each : values) made.push_back(mapped_tensors(each, alias));
    return made;
}

struct Captured {
    c10::OperatorHandle op;
    Values arguments, results;
};

struct Graph {
    std::vector<Captured> operators{};
    std::map<int64_t, int64_t> work{};  // number of operators of each stream
    std::vector<std::pair<c10::Storage, std::string>> before{};  // contents of memory that the operators have written
    std::vector<c10::Storage> kept{};  // memory that was made meanwhile, and is the graph's
    std::unordered_set<uint64_t> own{};  // serial numbers of all such memory
    std::vector<std::pair<at::Generator, at::Tensor>> generators{};  // and their states

    void add_generator(const at::Generator& generator) {  // of which replays draw
        generators.emplace_back(generator, at::Tensor(generator.unsafeGetGeneratorImpl()->get_state()));
    }
    void check_generator(const at::Generator& generator) const {
        const auto is_known = std::any_of(
            generators.begin(), generators.end(), [&](const auto& each) { return each.first == generator; });
        TORCH_CHECK(is_known, "Attempt to increase offset for a CUDA generator not in capture mode: "
            "CUDAGraph.register_generator_state() of this one must come before the capture");
    }
    void add(Captured captured) {
        operators.push_back(std::move(captured));
        ++work[stream_of_thread];
    }
};

std::mutex graphs_mutex;
std::map<int64_t, std::shared_ptr<Graph>>& graphs() {
    static auto* it = new std::map<int64_t, std::shared_ptr<Graph>>;
    return *it;
}
std::map<int64_t, std::shared_ptr<Graph>>& captured_streams() {
    static auto* it = new std::map<int64_t, std::shared_ptr<Graph>>;
    return *it;
}
std::atomic<bool> any_capture{false};

std::shared_ptr<Graph> graph_of(int64_t number) {
    std::lock_guard<std::mutex> lock(graphs_mutex);
    return graphs().at(number);
}

// The graph into which the current stream is captured, if it is.
std::shared_ptr<Graph> capturing() {
    if (!any_capture) return nullptr;
    std::lock_guard<std::mutex> lock(graphs_mutex);
    const auto found = captured_streams().find(stream_of_thread);
    return found == captured_streams().end() ? nullptr : found->second;
}

void memory_was_made(uint64_t serial) {
    if (const auto graph = capturing()) graph->own.insert(serial);
}

int64_t begin_graph() {
    static int64_t latest = 0;
    auto made = std::make_shared<Graph>();
    made->add_generator(default_generator());
    std::lock_guard<std::mutex> lock(graphs_mutex);
    graphs()[++latest] = made;
    return latest;
}

// From here on, until the graph ends, what is done in a stream is part of it.
void capture_stream(int64_t number, int64_t stream) {
    std::lock_guard<std::mutex> lock(graphs_mutex);
    captured_streams()[stream] = graphs().at(number);
    any_capture = true;
}

// Contents of memory of before the capture change places with those that its operators have left.
void swap_contents(Graph& graph) {
    for (auto& [storage, content] : graph.before) {
        auto* data = static_cast<char*>(storage.mutable_data());
        std::swap_ranges(data, data + std::min(content.size(), storage.nbytes()), content.begin());
    }
}

void swap_all_contents() {
    std::unordered_set<Graph*> all;
    std::lock_guard<std::mutex> lock(graphs_mutex);
    for (auto& [stream, graph] : captured_streams())
        if (all.insert(graph.get()).second) swap_contents(*graph);
}

// Work in a stream that is not captured, which runs at once: it finds memory as if captures had run nothing.
struct BesideCaptures {
    const bool is_beside;
    explicit BesideCaptures(bool is_captured) : is_beside(any_capture && !is_captured) {
        if (is_beside) swap_all_contents();
    }
    ~BesideCaptures() {
        if (is_beside) swap_all_contents();
    }
};

void end_graph(int64_t number) {
    const auto graph = graph_of(number);
    {
        std::lock_guard<std::mutex> lock(graphs_mutex);
        std::erase_if(captured_streams(), [&](const auto& each) { return each.second == graph; });
        any_capture = !captured_streams().empty();
    }
    swap_contents(*graph);
    graph->before.clear();
    for (auto& [generator, state] : graph->generators)
        generator.unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
}

// Before an operator of a capture runs: keeps what it may overwrite, also of the host, as pinned memory is.
void keep_contents(Graph& graph, const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
    const auto keep = [&graph](const at::Tensor& tensor) {
        if (!is_device_tensor(tensor) && !(tensor.defined() && tensor.is_cpu() && tensor.has_storage())) return tensor;
        const auto& storage = tensor.storage();
        const auto* data = static_cast<const char*>(storage.data());
        const auto serial = allocation_at(reinterpret_cast<uintptr_t>(data)).serial;
        if (!storage.nbytes() || graph.own.count(serial)) return tensor;
        for (const auto& [known, content] : graph.before)
            if (known.is_alias_of(storage)) return tensor;
        graph.before.emplace_back(storage, std::string(data, storage.nbytes()));
        return tensor;
    };
    for (size_t i = 0; i < arguments.size(); ++i) {
        const auto* info = op.schema().arguments()[i].alias_info();
        if (info && info->isWrite()) mapped_tensors(arguments[i], keep);
    }
}

bool shares_memory(const Values& values, const at::Tensor& with) {
    bool found = false;
    for (const auto& each : values)
        mapped_tensors(each, [&](const at::Tensor& tensor) {
            found |= is_device_tensor(tensor) && tensor.storage().is_alias_of(with.storage());
            return tensor;
        });
    return found;
}

// Puts new results where those of the capture are, unless they are there as views of arguments.
void put(const Captured& captured, const c10::IValue& made, const c10::IValue& wanted) {
    std::vector<at::Tensor> from, to;
    mapped_tensors(made, [&](const at::Tensor& tensor) { from.push_back(tensor); return tensor; });
    mapped_tensors(wanted, [&](const at::Tensor& tensor) { to.push_back(tensor); return tensor; });
    for (size_t i = 0; i < to.size(); ++i)
        if (is_device_tensor(to[i]) && !shares_memory(captured.arguments, to[i])) to[i].copy_(from[i]);
}

// Runs the operators from `first` to `last` of a graph again.
void replay_graph(int64_t number, int64_t first, int64_t last) {
    const auto graph = graph_of(number);
    at::AutoDispatchBelowADInplaceOrView below;
    for (int64_t i = first; i < last; ++i) {
        const Captured& captured = graph->operators.at(i);
        torch::jit::Stack stack = aliases(captured.arguments);  // of which an operator may change the shape
        captured.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CUDA), &stack);
        for (size_t j = 0; j < captured.results.size(); ++j)
            put(captured, stack[stack.size() - captured.results.size() + j], captured.results[j]);
    }
}

}  // namespace
