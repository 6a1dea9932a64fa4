// cooperative_groups.h and cuda/barrier for the CPU: blocks, tiles and groups of lanes with their
// collectives, and barriers in shared memory.
//
// A group is a set of lanes of one warp, given by its mask, or the whole block. Its functions are
// those of section 6 and 7 of simt.h with that mask. A barrier of the whole grid needs all blocks
// at once. Blocks run one after another here, so a kernel that calls it ends there, unless its grid
// is one block.
#pragma once
#include "simt.h"

namespace cooperative_groups {

SIMT_INLINE unsigned simt_rank_in_block() {
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
SIMT_INLINE unsigned simt_threads_of_block() { return blockDim.x * blockDim.y * blockDim.z; }
SIMT_INLINE unsigned simt_own_lane() { return simt_rank_in_block() % SIMT_WARP; }
// The lane of the n-th bit set, from 0.
SIMT_INLINE unsigned simt_lane_of(unsigned mask, unsigned n) {
    while (n--) mask &= mask - 1;
    return mask ? __builtin_ctz(mask) : simt_own_lane();
}
// The bits of `votes` in the places of `mask`, moved together.
SIMT_INLINE unsigned simt_packed(unsigned votes, unsigned mask) {
    unsigned result = 0;
    for (unsigned n = 0; mask; mask &= mask - 1, n++)
        result |= unsigned(votes >> __builtin_ctz(mask) & 1) << n;
    return result;
}
// A value of any type from another lane, word by word.
template <class T> SIMT_INLINE T simt_from_lane(unsigned mask, T value, unsigned lane) {
    unsigned words[(sizeof(T) + 3) / 4] = {};
    __builtin_memcpy(words, &value, sizeof(T));
    for (unsigned& word : words) word = __shfl_sync(mask, word, int(lane));
    __builtin_memcpy(&value, words, sizeof(T));
    return value;
}

// mask: the lanes; 0 for the whole block
class thread_group {
protected:
    unsigned mask;
    explicit thread_group(unsigned mask) : mask(mask) {}
    friend SIMT_INLINE thread_group tiled_partition(const thread_group& group, unsigned size);

public:
    SIMT_INLINE void sync() const {
        if (mask) __syncwarp(mask);
        else __syncthreads();
    }
    SIMT_INLINE unsigned long long size() const {
        return mask ? __popc(mask) : simt_threads_of_block();
    }
    SIMT_INLINE unsigned long long num_threads() const { return size(); }
    SIMT_INLINE unsigned long long thread_rank() const {
        return mask ? __popc(mask & ((1u << simt_own_lane()) - 1)) : simt_rank_in_block();
    }
};

class thread_block : public thread_group {
public:
    thread_block() : thread_group(0) {}
    static SIMT_INLINE void sync() { __syncthreads(); }
    static SIMT_INLINE unsigned thread_rank() { return simt_rank_in_block(); }
    static SIMT_INLINE unsigned size() { return simt_threads_of_block(); }
    static SIMT_INLINE unsigned num_threads() { return simt_threads_of_block(); }
    static SIMT_INLINE dim3 group_index() { return {blockIdx.x, blockIdx.y, blockIdx.z}; }
    static SIMT_INLINE dim3 thread_index() { return {threadIdx.x, threadIdx.y, threadIdx.z}; }
    static SIMT_INLINE dim3 group_dim() { return blockDim; }
    static SIMT_INLINE dim3 dim_threads() { return blockDim; }
};
inline thread_block this_thread_block() { return {}; }

class grid_group {
public:
    SIMT_CALL void sync() const {
        if (gridDim.x * gridDim.y * gridDim.z != 1)
            simt_trap("grid.sync() needs all blocks at once, which only a GPU runs", SIMT_PC);
        simt_barrier(SIMT_BARRIER, 0, SIMT_PC);
    }
    static SIMT_INLINE bool is_valid() { return gridDim.x * gridDim.y * gridDim.z == 1; }
    static SIMT_INLINE unsigned long long block_rank() {
        return blockIdx.x + (unsigned long long)gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    }
    static SIMT_INLINE unsigned long long num_blocks() {
        return (unsigned long long)gridDim.x * gridDim.y * gridDim.z;
    }
    static SIMT_INLINE unsigned long long thread_rank() {
        return block_rank() * simt_threads_of_block() + simt_rank_in_block();
    }
    static SIMT_INLINE unsigned long long size() {
        return num_blocks() * simt_threads_of_block();
    }
    static SIMT_INLINE unsigned long long num_threads() { return size(); }
    static SIMT_INLINE dim3 group_dim() { return gridDim; }
    static SIMT_INLINE dim3 dim_blocks() { return gridDim; }
    static SIMT_INLINE dim3 block_index() { return {blockIdx.x, blockIdx.y, blockIdx.z}; }
};
inline grid_group this_grid() { return {}; }

// The lanes that are there together. Its ranks count only those.
class coalesced_group : public thread_group {
public:
    explicit coalesced_group(unsigned mask) : thread_group(mask) {}
    SIMT_INLINE unsigned size() const { return __popc(mask); }
    SIMT_INLINE unsigned num_threads() const { return __popc(mask); }
    SIMT_INLINE unsigned thread_rank() const {
        return __popc(mask & ((1u << simt_own_lane()) - 1));
    }
    SIMT_INLINE unsigned meta_group_rank() const { return 0; }
    SIMT_INLINE unsigned meta_group_size() const { return 1; }
    SIMT_INLINE void sync() const { __syncwarp(mask); }
    template <class T> SIMT_INLINE T shfl(T value, unsigned rank) const {
        return simt_from_lane(mask, value, simt_lane_of(mask, rank));
    }
    template <class T> SIMT_INLINE T shfl_up(T value, unsigned distance) const {
        unsigned rank = thread_rank();
        return shfl(value, rank >= distance ? rank - distance : rank);
    }
    template <class T> SIMT_INLINE T shfl_down(T value, unsigned distance) const {
        unsigned rank = thread_rank();
        return shfl(value, rank + distance < size() ? rank + distance : rank);
    }
    SIMT_INLINE int any(int predicate) const { return __any_sync(mask, predicate); }
    SIMT_INLINE int all(int predicate) const { return __all_sync(mask, predicate); }
    SIMT_INLINE unsigned ballot(int predicate) const {
        return simt_packed(__ballot_sync(mask, predicate), mask);
    }
    template <class T> SIMT_INLINE unsigned match_any(T value) const {
        return simt_packed(__match_any_sync(mask, value), mask);
    }
    template <class T> SIMT_INLINE unsigned match_all(T value, int& all) const {
        return simt_packed(__match_all_sync(mask, value, &all), mask);
    }
};
SIMT_INLINE coalesced_group coalesced_threads() { return coalesced_group(__activemask()); }

// `tile_size` neighbouring lanes. Parent: void for the block, else the tile that it is a part of.
template <unsigned tile_size, class Parent = void> class thread_block_tile : public thread_group {
    static_assert(tile_size <= 32 && (tile_size & (tile_size - 1)) == 0,
                  "a tile of the CPU has 1, 2, 4, 8, 16 or 32 threads");
    static SIMT_INLINE unsigned first_lane() { return simt_own_lane() & ~(tile_size - 1); }

public:
    thread_block_tile() : thread_group(~0u >> (32 - tile_size) << first_lane()) {}
    template <class Other> thread_block_tile(const thread_block_tile<tile_size, Other>&)
        : thread_block_tile() {}
    static SIMT_INLINE unsigned size() { return tile_size; }
    static SIMT_INLINE unsigned num_threads() { return tile_size; }
    static SIMT_INLINE unsigned thread_rank() { return simt_own_lane() % tile_size; }
    static SIMT_INLINE unsigned meta_group_rank() {
        if constexpr (__is_same(Parent, void)) return simt_rank_in_block() / tile_size;
        else return Parent::thread_rank() / tile_size;
    }
    static SIMT_INLINE unsigned meta_group_size() {
        if constexpr (__is_same(Parent, void))
            return (simt_threads_of_block() + tile_size - 1) / tile_size;
        else return Parent::size() / tile_size;
    }
    SIMT_INLINE void sync() const { __syncwarp(mask); }
    template <class T> SIMT_INLINE T shfl(T value, int rank) const {
        return simt_from_lane(mask, value, first_lane() + unsigned(rank) % tile_size);
    }
    template <class T> SIMT_INLINE T shfl_up(T value, unsigned distance) const {
        unsigned rank = thread_rank();
        return shfl(value, rank >= distance ? rank - distance : rank);
    }
    template <class T> SIMT_INLINE T shfl_down(T value, unsigned distance) const {
        unsigned rank = thread_rank();
        return shfl(value, rank + distance < tile_size ? rank + distance : rank);
    }
    template <class T> SIMT_INLINE T shfl_xor(T value, unsigned bits) const {
        return shfl(value, thread_rank() ^ (bits % tile_size));
    }
    SIMT_INLINE int any(int predicate) const { return __any_sync(mask, predicate); }
    SIMT_INLINE int all(int predicate) const { return __all_sync(mask, predicate); }
    SIMT_INLINE unsigned ballot(int predicate) const {
        return __ballot_sync(mask, predicate) >> first_lane();
    }
    template <class T> SIMT_INLINE unsigned match_any(T value) const {
        return __match_any_sync(mask, value) >> first_lane();
    }
    template <class T> SIMT_INLINE unsigned match_all(T value, int& all) const {
        return __match_all_sync(mask, value, &all) >> first_lane();
    }
};

template <unsigned tile_size>
SIMT_INLINE thread_block_tile<tile_size> tiled_partition(const thread_block&) {
    return {};
}
template <unsigned tile_size, unsigned size, class Parent>
SIMT_INLINE thread_block_tile<tile_size, thread_block_tile<size, Parent>> tiled_partition(
    const thread_block_tile<size, Parent>&) {
    static_assert(tile_size <= size, "a part of a tile is not larger than the tile");
    return {};
}
SIMT_INLINE thread_group tiled_partition(const thread_group& group, unsigned size) {
    if (size == 0 || size > 32 || (size & (size - 1)) || size > group.size())
        simt_stop_here("a tile has 1, 2, 4, 8, 16 or 32 threads, and not more than its group");
    return thread_group(~0u >> (32 - size) << (simt_own_lane() & ~(size - 1)));
}
// The lanes of a group with the same predicate or label as this one.
template <class Group>
SIMT_INLINE coalesced_group labeled_partition(const Group& group, unsigned label) {
    unsigned mask = group.ballot(1);
    unsigned first = simt_own_lane() - group.thread_rank();
    if constexpr (__is_same(Group, coalesced_group)) {
        mask = __activemask();
        first = 0;
    }
    return coalesced_group(__match_any_sync(mask << first, label));
}
template <class Group>
SIMT_INLINE coalesced_group binary_partition(const Group& group, bool predicate) {
    return labeled_partition(group, predicate);
}

template <class Group> SIMT_INLINE void sync(const Group& group) { group.sync(); }
template <class Group> SIMT_INLINE void wait(const Group& group) { group.sync(); }
template <class Group, class F> SIMT_INLINE void invoke_one(const Group& group, F&& function) {
    if (group.thread_rank() == 0) function();
}
// The copy is complete when the call returns; wait(group) makes it known to the others.
template <class Group, class T, class S>
SIMT_INLINE void memcpy_async(const Group& group, T* to, const S* from, size_t bytes) {
    static_assert(sizeof(T) == sizeof(S), "a copy between elements of one size");
    size_t step = group.size();
    for (size_t i = group.thread_rank(); i < bytes / sizeof(T); i += step) to[i] = T(from[i]);
}

template <class T> struct plus { T operator()(T a, T b) const { return a + b; } };
template <class T> struct less { T operator()(T a, T b) const { return b < a ? b : a; } };
template <class T> struct greater { T operator()(T a, T b) const { return a < b ? b : a; } };
template <class T> struct bit_and { T operator()(T a, T b) const { return a & b; } };
template <class T> struct bit_or { T operator()(T a, T b) const { return a | b; } };
template <class T> struct bit_xor { T operator()(T a, T b) const { return a ^ b; } };

// Every thread of the group gets the result, in the order of a tree.
template <unsigned size, class Parent, class T, class Operation>
SIMT_INLINE T reduce(const thread_block_tile<size, Parent>& group, T value, Operation&& join) {
    for (unsigned step = size / 2; step; step /= 2)
        value = join(value, group.shfl_xor(value, step));
    return value;
}
template <class T, class Operation>
SIMT_INLINE T reduce(const coalesced_group& group, T value, Operation&& join) {
    T result = group.shfl(value, 0);
    for (unsigned rank = 1; rank < group.size(); rank++)
        result = join(result, group.shfl(value, rank));
    return result;
}
template <class Group, class T, class Operation>
SIMT_INLINE T inclusive_scan(const Group& group, T value, Operation&& join) {
    T result = value;
    for (unsigned rank = 0; rank < group.size(); rank++) {
        T other = group.shfl(value, rank);
        if (rank == 0) result = other;
        else if (rank <= group.thread_rank()) result = join(result, other);
    }
    return result;
}
template <class Group, class T> SIMT_INLINE T inclusive_scan(const Group& group, T value) {
    return inclusive_scan(group, value, plus<T>());
}
// The first thread gets T().
template <class Group, class T, class Operation>
SIMT_INLINE T exclusive_scan(const Group& group, T value, Operation&& join) {
    T result = group.shfl_up(inclusive_scan(group, value, join), 1);
    return group.thread_rank() ? result : T();
}
template <class Group, class T> SIMT_INLINE T exclusive_scan(const Group& group, T value) {
    return exclusive_scan(group, value, plus<T>());
}

}  // namespace cooperative_groups

namespace std {
template <class T> struct simt_plain { typedef T type; };
template <class T> struct simt_plain<T&> { typedef T type; };
template <class T> struct simt_plain<T&&> { typedef T type; };
template <class T> constexpr typename simt_plain<T>::type&& move(T&& value) {
    return static_cast<typename simt_plain<T>::type&&>(value);
}
}  // namespace std

namespace cuda {

using std::move;
enum thread_scope {
    thread_scope_system, thread_scope_device, thread_scope_block, thread_scope_thread
};
template <size_t alignment> struct aligned_size_t {
    size_t value;
    explicit constexpr aligned_size_t(size_t value) : value(value) {}
    constexpr operator size_t() const { return value; }
};

// A phase ends when `expected` threads have arrived. A thread that waits lets others run.
template <thread_scope scope = thread_scope_system> class barrier {
    unsigned expected, pending, phase;

public:
    typedef unsigned arrival_token;

    barrier() = default;
    barrier(const barrier&) = delete;
    barrier(ptrdiff_t count) : expected(unsigned(count)), pending(unsigned(count)), phase(0) {}
    friend SIMT_INLINE void init(barrier* bar, ptrdiff_t count) {
        bar->expected = bar->pending = unsigned(count);
        bar->phase = 0;
    }
    SIMT_INLINE arrival_token arrive(ptrdiff_t count = 1) {
        __threadfence_block();
        unsigned token = atomicAdd(&phase, 0u);
        if (atomicSub(&pending, unsigned(count)) == unsigned(count)) {
            atomicExch(&pending, atomicAdd(&expected, 0u));
            atomicAdd(&phase, 1u);
        }
        return token;
    }
    SIMT_INLINE void wait(arrival_token&& token) {
        while (atomicAdd(&phase, 0u) == token)
            simt_wait_here("waits at a cuda::barrier, and no other thread can arrive there");
    }
    SIMT_INLINE void wait(const arrival_token& token) { wait(arrival_token(token)); }
    SIMT_INLINE void wait_parity(bool parity) {
        while ((atomicAdd(&phase, 0u) & 1) == parity)
            simt_wait_here("waits at a cuda::barrier, and no other thread can arrive there");
    }
    SIMT_INLINE void arrive_and_wait() { wait(arrive()); }
    SIMT_INLINE void arrive_and_drop() {
        atomicSub(&expected, 1u);
        arrive();
    }
    static constexpr ptrdiff_t max() { return (1 << 20) - 1; }
};

}  // namespace cuda
