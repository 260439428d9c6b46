// Operators of torch that a CUDA graph holds: noted while a thread captures it, and run again by each replay.
//
// A capture on a GPU runs nothing. Here the operators do run, for the shapes of their results; memory that was there
// before the capture has its contents back when it ends.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "hooks.h"

namespace {

using Values = std::vector<c10::IValue>;

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
    std::vector<std::pair<c10::Storage, std::string>> before{};  // contents of memory that the operators have written
    std::vector<c10::Storage> kept{};  // memory that was made meanwhile, and is the graph's
    uint64_t serial = 0;                                         // of the latest memory that was there before
    at::Tensor generator{};                                      // state of the default one
};

std::mutex graphs_mutex;
std::map<int64_t, std::shared_ptr<Graph>>& graphs() {
    static auto* it = new std::map<int64_t, std::shared_ptr<Graph>>;
    return *it;
}
thread_local std::shared_ptr<Graph> capturing;

std::shared_ptr<Graph> graph_of(int64_t number) {
    std::lock_guard<std::mutex> lock(graphs_mutex);
    return graphs().at(number);
}

int64_t begin_graph() {
    static int64_t latest = 0;
    auto made = std::make_shared<Graph>();
    made->serial = latest_serial();
    made->generator = at::Tensor(default_generator().unsafeGetGeneratorImpl()->get_state());
    std::lock_guard<std::mutex> lock(graphs_mutex);
    graphs()[++latest] = capturing = made;
    return latest;
}

void end_graph() {
    auto graph = std::exchange(capturing, nullptr);
    if (!graph) return;
    for (auto& [storage, content] : graph->before)
        memcpy(storage.mutable_data(), content.data(), std::min(content.size(), storage.nbytes()));
    graph->before.clear();
    default_generator().unsafeGetGeneratorImpl()->set_state(*graph->generator.unsafeGetTensorImpl());
}

// Before an operator of a capture runs: keeps what it may overwrite.
void keep_contents(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
    const auto keep = [](const at::Tensor& tensor) {
        if (!is_device_tensor(tensor) || !tensor.storage().nbytes()) return tensor;
        const auto& storage = tensor.storage();
        const auto* data = static_cast<const char*>(storage.data());
        for (const auto& [known, content] : capturing->before)
            if (known.is_alias_of(storage)) return tensor;
        if (allocation_at(reinterpret_cast<uintptr_t>(data)).serial <= capturing->serial)
            capturing->before.emplace_back(storage, std::string(data, storage.nbytes()));
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
        torch::jit::Stack stack = captured.arguments;
        captured.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CUDA), &stack);
        for (size_t j = 0; j < captured.results.size(); ++j)
            put(captured, stack[stack.size() - captured.results.size() + j], captured.results[j]);
    }
}

}  // namespace
