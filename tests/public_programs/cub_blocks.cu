// Kernels of CUB, by block: one call each, on int32 and float32. Compiled by cub_blocks.py.
#include <cub/block/block_histogram.cuh>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/warp/warp_merge_sort.cuh>

constexpr int THREADS = 128, ITEMS = 4;

extern "C" __global__ void __launch_bounds__(THREADS) reduce(const int *x, int *y, int count) {
  using Reduce = cub::BlockReduce<int, THREADS>;
  __shared__ typename Reduce::TempStorage storage;
  int sum = 0;
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS) sum += x[i];
  sum = Reduce(storage).Sum(sum);
  if (threadIdx.x == 0) atomicAdd(y, sum);
}

extern "C" __global__ void __launch_bounds__(THREADS) scan(const int *x, int *y, int count) {
  using Scan = cub::BlockScan<int, THREADS>;
  __shared__ typename Scan::TempStorage storage;
  int items[ITEMS], first = (blockIdx.x * THREADS + threadIdx.x) * ITEMS;
  for (int i = 0; i < ITEMS; i++) items[i] = first + i < count ? x[first + i] : 0;
  Scan(storage).InclusiveSum(items, items);
  for (int i = 0; i < ITEMS; i++)
    if (first + i < count) y[first + i] = items[i];
}

extern "C" __global__ void __launch_bounds__(THREADS) sort(const float *x, float *y, int count) {
  using Sort = cub::BlockRadixSort<float, THREADS, ITEMS>;
  __shared__ typename Sort::TempStorage storage;
  float items[ITEMS];
  int first = (blockIdx.x * THREADS + threadIdx.x) * ITEMS;
  for (int i = 0; i < ITEMS; i++) items[i] = x[first + i];
  Sort(storage).Sort(items);
  for (int i = 0; i < ITEMS; i++) y[first + i] = items[i];
}

extern "C" __global__ void __launch_bounds__(THREADS) histogram(const unsigned char *x, unsigned *y, int count) {
  using Histogram = cub::BlockHistogram<unsigned char, THREADS, ITEMS, 256, cub::BLOCK_HISTO_ATOMIC>;
  __shared__ typename Histogram::TempStorage storage;
  __shared__ unsigned bins[256];
  unsigned char items[ITEMS];
  int first = (blockIdx.x * THREADS + threadIdx.x) * ITEMS;
  for (int i = 0; i < ITEMS; i++) items[i] = x[first + i];
  Histogram(storage).Histogram(items, bins);
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += THREADS) atomicAdd(y + i, bins[i]);
}

struct Less {
  __device__ bool operator()(int a, int b) const { return a < b; }
};

extern "C" __global__ void __launch_bounds__(THREADS) merge(const int *x, int *y, int count) {
  using Sort = cub::WarpMergeSort<int, ITEMS, 32>;
  __shared__ typename Sort::TempStorage storage[THREADS / 32];
  int items[ITEMS], first = (blockIdx.x * THREADS + threadIdx.x) * ITEMS;
  for (int i = 0; i < ITEMS; i++) items[i] = x[first + i];
  Sort(storage[threadIdx.x / 32]).Sort(items, Less());
  for (int i = 0; i < ITEMS; i++) y[first + i] = items[i];
}
