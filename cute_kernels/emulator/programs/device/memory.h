// Device memory: pages of the host, far from each other, with a note of which tensor they were made for.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <atomic>
#include <deque>
#include <map>
#include <unordered_set>

// Of Python's stable interface; the library is loaded by Python and needs no headers of it.
extern "C" {
void* PyGILState_GetThisThreadState();
int PyGILState_Ensure();
void PyGILState_Release(int);
void* PyEval_GetFrame();
void* PyFrame_GetBack(void*);
void* PyFrame_GetCode(void*);
int PyFrame_GetLineNumber(void*);
void* PyObject_GetAttrString(void*, const char*);
const char* PyUnicode_AsUTF8AndSize(void*, ssize_t*);
void Py_IncRef(void*);
void Py_DecRef(void*);
}

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

// Whether a program runs that has the device, and whether this thread is one of it: others put nothing there. When none
// runs, torch itself refuses what a program asks for; operators on what is left of a program go on.
std::atomic<bool> active{false};
thread_local bool inside = false;

// Whether it or anything that was made on it is there: backward functions of what a program has left ask for streams.
std::atomic<int64_t> allocations_left{0};
bool is_there() { return active || allocations_left > 0; }

// Where CUDA cannot be used: in a process that was forked of a program that had begun to use it.
std::atomic<bool> in_bad_fork{false};
void check_fork() {
    TORCH_CHECK(!in_bad_fork, "CUDA error: initialization error: this process was forked from one that uses CUDA; with "
        "multiprocessing, use the 'spawn' start method");
}

struct Allocation {
    uintptr_t address = 0;
    size_t nbytes = 0;
    uint64_t serial = 0;  // tells two at one address apart; in the order in which they were made
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    std::vector<int64_t> shape{};  // of the first tensor with the memory
    bool is_contiguous = false;
    std::string maker{};  // file of the program that made it, or ""
    int line = 0;
};

// Raises for another device than cuda:0.
void check_index(c10::Device device) {
    TORCH_CHECK(device.index() <= 0, "CUDA error: invalid device ordinal: ", device,
        "; emulated programs have one device, ", kDevice);
}

// Raises for a thread that is not of the program that runs as well.
void check_device(c10::Device device) {
    TORCH_CHECK(inside || !active, "Torch not compiled with CUDA enabled: \"cuda\" is there for programs that run in the emulator");
    check_index(device);
}

// Bytes on each side of memory: an access 256 rows of 1 KiB beyond it is no access of another tensor.
constexpr size_t kGuard = 256 << 10, kPage = 4096;
constexpr size_t kLarge = 64 << 20;        // given back to the system when it is freed, and reserved when it is made
constexpr size_t kMostSpare = 256 << 20;   // bytes that are kept of smaller memory; the oldest goes first
constexpr size_t kRests = 16;              // memory is not used again before so much more of its size is freed
constexpr size_t kMostReserved = size_t{4} << 30;  // bytes of addresses that rest without memory, the oldest goes first
constexpr size_t kMostFreed = 256;         // that are remembered

struct Memory {
    std::mutex mutex;
    std::map<uintptr_t, Allocation> live;
    std::deque<Allocation> freed;
    std::map<size_t, std::deque<uint64_t>> spare;  // by the size of the mapping: keys of `resting`, the oldest first
    std::map<uint64_t, std::pair<char*, size_t>> resting;  // spare mappings in the order in which they were freed
    std::deque<std::pair<char*, size_t>> reserved;  // addresses without memory: the system gives them to nobody yet
    size_t spare_bytes = 0, reserved_bytes = 0, used = 0, peak = 0;
    uint64_t serial = 0, frees = 0;
    int new_byte = 0;
    int64_t most = 0;
    std::vector<std::string> libraries;  // folders whose functions are not the program's
    std::unordered_set<const void*> pinned;
};

Memory& memory() {
    static Memory* it = new Memory;  // outlives the tensors of modules
    return *it;
}

size_t mapped(size_t nbytes) { return kGuard + ((nbytes + kPage - 1) & ~(kPage - 1)) + kGuard; }

// The whole of a new mapping, or nullptr. What is large counts against the memory that there is.
char* map(size_t size) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (size < kLarge ? MAP_NORESERVE : 0);
    void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    return start == MAP_FAILED ? nullptr : static_cast<char*>(start);
}

// The start of a spare mapping, which is the oldest of its size and spare no longer.
char* take_spare(Memory& m, uint64_t key) {
    const auto found = m.resting.find(key);
    const auto [start, size] = found->second;
    m.resting.erase(found);
    m.spare[size].pop_front();
    m.spare_bytes -= size;
    return start;
}

// Gives the memory of a mapping back to the system; its addresses rest.
void reserve(Memory& m, char* start, size_t size) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(start, size, PROT_NONE, flags, -1, 0) == MAP_FAILED) {
        munmap(start, size);
        return;
    }
    m.reserved.emplace_back(start, size);
    m.reserved_bytes += size;
}

// Gives the oldest addresses back, those beyond a number of bytes.
void give_back(Memory& m, size_t most) {
    while (m.reserved_bytes > most) {
        const auto [start, size] = m.reserved.front();
        munmap(start, size);
        m.reserved_bytes -= size;
        m.reserved.pop_front();
    }
}

void release(void* pointer);
void reset_peak();
void memory_was_made(uint64_t serial);

struct DeviceMemory final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t nbytes) override {
        check_fork();
        if (nbytes == 0) return {nullptr, nullptr, &release, kDevice};
        Memory& m = memory();
        std::lock_guard<std::mutex> lock(m.mutex);
        const size_t size = mapped(nbytes);
        auto& spare = m.spare[size];
        char* start = nullptr;
        const bool is_new = spare.size() <= kRests;
        if (is_new) {
            const bool fits = m.used + nbytes <= static_cast<size_t>(m.most);
            if (fits) start = map(size);
            if (fits && !start) {  // a limit of addresses
                give_back(m, 0);
                start = map(size);
            }
            TORCH_CHECK_WITH(OutOfMemoryError, start, "CUDA out of memory. Tried to allocate ", nbytes,
                " bytes: can't allocate memory");
        } else {
            start = take_spare(m, spare.front());
        }
        char* pointer = start + kGuard;
        if (!is_new || m.new_byte) memset(pointer, m.new_byte, nbytes);
        const auto address = reinterpret_cast<uintptr_t>(pointer);
        Allocation made;
        made.address = address, made.nbytes = nbytes, made.serial = ++m.serial;
        // What is beyond this memory is no longer in what was there before, at this address or, once it was given back
        // to the system, at another one.
        const auto gone = [&](const Allocation& each) {
            return each.address < address - kGuard + size && address - kGuard < each.address + each.nbytes;
        };
        m.freed.erase(std::remove_if(m.freed.begin(), m.freed.end(), gone), m.freed.end());
        memory_was_made(made.serial);
        m.live.emplace(address, std::move(made));
        ++allocations_left;
        m.used += nbytes;
        m.peak = std::max(m.peak, m.used);
        return {pointer, pointer, &release, kDevice};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {}
    void recordStream(const c10::DataPtr&, c10::Stream) override {}
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex) override { reset_peak(); }
};

void free_pinned(void* pointer) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    memory().pinned.erase(pointer);
    free(pointer);
}

// Host memory that says that it is pinned.
struct PinnedMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        void* pointer = nullptr;
        const bool failed = posix_memalign(&pointer, kPage, std::max<size_t>(nbytes, 1)) != 0;
        TORCH_CHECK(!failed, "can't allocate memory: ", nbytes, " pinned bytes");
        std::lock_guard<std::mutex> lock(memory().mutex);
        memory().pinned.insert(pointer);
        return {pointer, pointer, &free_pinned, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
    void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};

bool is_of_library(const char* file) {
    for (const auto& folder : memory().libraries)
        if (strncmp(file, folder.c_str(), folder.size()) == 0) return true;
    return false;
}

// File and line of the program that runs, of neither torch nor this package.
std::pair<std::string, int> maker() {
    if (!PyGILState_GetThisThreadState()) return {};  // no thread of Python
    const int state = PyGILState_Ensure();
    std::pair<std::string, int> found;
    void* frame = PyEval_GetFrame();
    if (frame) Py_IncRef(frame);
    while (frame && found.first.empty()) {
        void* code = PyFrame_GetCode(frame);
        void* name = PyObject_GetAttrString(code, "co_filename");
        const char* file = name ? PyUnicode_AsUTF8AndSize(name, nullptr) : nullptr;
        if (file && !is_of_library(file)) found = {file, PyFrame_GetLineNumber(frame)};
        if (name) Py_DecRef(name);
        Py_DecRef(code);
        void* back = PyFrame_GetBack(frame);
        Py_DecRef(frame);
        frame = back;
    }
    if (frame) Py_DecRef(frame);
    PyGILState_Release(state);
    return found;
}

c10::Allocator* device_memory() {
    static DeviceMemory* it = new DeviceMemory;
    return it;
}

c10::Allocator* pinned_memory() {
    static PinnedMemory* it = new PinnedMemory;
    return it;
}

bool is_pinned(const void* data) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    return memory().pinned.count(data) != 0;
}

void release(void* pointer) {
    Memory& m = memory();
    std::lock_guard<std::mutex> lock(m.mutex);
    auto found = m.live.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == m.live.end()) return;
    const size_t size = mapped(found->second.nbytes);
    m.used -= found->second.nbytes;
    m.freed.push_back(std::move(found->second));
    if (m.freed.size() > kMostFreed) m.freed.pop_front();
    m.live.erase(found);
    --allocations_left;
    char* start = static_cast<char*>(pointer) - kGuard;
    if (size >= kLarge) {
        reserve(m, start, size);
    } else {
        m.spare[size].push_back(m.frees);
        m.resting.emplace(m.frees++, std::pair(start, size));
        m.spare_bytes += size;
    }
    while (m.spare_bytes > kMostSpare) {
        const auto [key, oldest] = *m.resting.begin();
        take_spare(m, key);
        reserve(m, oldest.first, oldest.second);
    }
    give_back(m, kMostReserved);
}

void begin_memory(int64_t new_byte, int64_t most, std::vector<std::string> libraries) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    memory().new_byte = static_cast<int>(new_byte);
    memory().most = most;
    memory().freed.clear();  // tensors of the program before
    memory().libraries = std::move(libraries);
}

void describe_memory(const at::Tensor& first) {
    if (!first.nbytes()) return;
    auto [file, line] = maker();
    std::lock_guard<std::mutex> lock(memory().mutex);
    auto found = memory().live.find(reinterpret_cast<uintptr_t>(first.storage().data()));
    if (found == memory().live.end()) return;
    Allocation& it = found->second;
    it.dtype = first.scalar_type();
    it.shape = first.sizes().vec();
    it.is_contiguous = first.is_contiguous();
    it.maker = std::move(file);
    it.line = line;
}

std::vector<Allocation> allocations() {
    std::lock_guard<std::mutex> lock(memory().mutex);
    std::vector<Allocation> all;
    for (const auto& [address, each] : memory().live) all.push_back(each);
    std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.serial < b.serial; });
    return all;
}

Allocation allocation_at(uintptr_t address) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    auto found = memory().live.find(address);
    return found == memory().live.end() ? Allocation{} : found->second;
}

Allocation freed_at(uintptr_t address) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    const auto& freed = memory().freed;
    for (auto each = freed.rbegin(); each != freed.rend(); ++each)
        if (each->address <= address && address < each->address + each->nbytes) return *each;
    return {};
}

std::pair<size_t, size_t> used_and_peak() {
    std::lock_guard<std::mutex> lock(memory().mutex);
    return {memory().used, memory().peak};
}

void reset_peak() {
    std::lock_guard<std::mutex> lock(memory().mutex);
    memory().peak = memory().used;
}

}  // namespace
