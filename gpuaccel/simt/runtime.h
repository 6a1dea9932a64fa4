// The interface of a kernel's library and the runtime: the thread's coordinates, and the calls that
// a kernel makes.
//
// A CUDA thread is a fibre, which gets a stack of its own when it has to wait. The threads of a
// block run one after another on one operating-system thread, each until it waits or ends. Blocks
// are spread over several operating-system threads. So `threadIdx` and the others are plain
// thread-local variables, which a debugger prints, and a kernel without barriers runs as one loop.
#pragma once
#include <stddef.h>
#include <stdint.h>

// The fast kind of thread-local variable needs space that other libraries may have used up.
// build.py then takes the other kind.
#ifndef SIMT_TLS
#define SIMT_TLS __attribute__((tls_model("initial-exec")))
#endif

// threadIdx and its like are constants in a checked kernel, as in CUDA, and no access to them is
// instrumented. A fast kernel becomes a part of the loop that sets them: there they are variables.
#if defined(SIMT_CHECKED) && !defined(SIMT_EXECUTOR)
#define SIMT_INDEX const
#else
#define SIMT_INDEX
#endif

struct uint3 { unsigned x, y, z; };
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};

enum { SIMT_WARP = 32, SIMT_MAX_THREADS = 1024 };

// What threads wait at. The operations of a warp take the `value` of each lane; a shuffle also
// takes the lane to read from (`argument`). driver.py has the same list.
enum simt_kind {
    SIMT_SHUFFLE, SIMT_BALLOT, SIMT_ANY, SIMT_ALL, SIMT_SYNCWARP, SIMT_MATCH_ANY, SIMT_MATCH_ALL,
    SIMT_ADD, SIMT_MIN_SIGNED, SIMT_MAX_SIGNED, SIMT_MIN, SIMT_MAX, SIMT_AND, SIMT_OR, SIMT_XOR,
    SIMT_BARRIER, SIMT_BARRIER_COUNT, SIMT_BARRIER_AND, SIMT_BARRIER_OR, SIMT_ACTIVE
};

// A worker is an operating-system thread that runs blocks. This part of it is used by the loop over
// a block's threads.
struct simt_worker {
    unsigned threads;             // of a block
    unsigned next;                // first thread that has not started
    unsigned current;             // the one that runs
    unsigned exited;
    unsigned waiting;             // threads that wait for others
    unsigned live[SIMT_WARP];     // per warp: lanes that have not exited
    uint3 start;                  // threadIdx of `next`
    uint3 at[SIMT_MAX_THREADS];   // threadIdx of each started thread
    uint3* index;                 // threadIdx of this operating-system thread
    void** arguments;             // as cuLaunchKernel takes them
    char* dynamic;                // dynamic shared memory
};

#pragma GCC visibility push(default)
extern "C" {
extern SIMT_TLS __thread SIMT_INDEX uint3 threadIdx, blockIdx;
extern SIMT_TLS __thread SIMT_INDEX dim3 blockDim, gridDim;
extern SIMT_TLS __thread simt_worker* simt_me;

// `pc`: an address in the caller, which becomes a source line in messages.
// __syncthreads and its _count, _and, _or:
int simt_barrier(int kind, int predicate, void* pc);
unsigned long long simt_warp(
    int kind, unsigned mask, unsigned long long value, int argument, void* pc);
// __activemask: the lanes that are at the same place
unsigned simt_active(void* pc);
// __threadfence (checked builds only):
void simt_fence(void* pc);
// Before an atomic operation (checked builds only):
void simt_atomic(void* address, size_t size, void* pc);
void simt_atomic_swap(void* address, size_t size, void* pc);
// Lets other threads of the block run. With a reason it ends the launch where none can:
void simt_pause(const char* reason, void* pc);
// The heap of the kernels; null when it is full:
void* simt_allocate(size_t bytes, size_t alignment, void* pc);
void simt_free(void* block, void* pc);
// Ends the launch:
void simt_trap(const char* reason, void* pc);
int simt_print(const char* format, ...) __attribute__((format(printf, 1, 2)));
// A thread has ended while others wait:
void simt_exited(simt_worker* worker);
}
#pragma GCC visibility pop

#define SIMT_PC __builtin_return_address(0)

// The loop over a block's threads, and a kernel's parameters as text: p pointer, s struct,
// n number, each with its size. The compiler deduces the types, so that no text is parsed.
template <class T> struct simt_letter { static constexpr char value = __is_class(T) ? 's' : 'n'; };
template <class T> struct simt_letter<T*> { static constexpr char value = 'p'; };
template <int... I> struct simt_indices {};
template <int N, int... I> struct simt_count : simt_count<N - 1, N - 1, I...> {};
template <int... I> struct simt_count<0, I...> { using type = simt_indices<I...>; };

template <auto K, class F> struct simt_launcher;
template <auto K, class... A> struct simt_launcher<K, void (*)(A...)> {
    template <int... I>
    static inline __attribute__((always_inline)) void call(void** arguments, simt_indices<I...>) {
        K(*static_cast<A*>(arguments[I])...);
    }
    __attribute__((no_sanitize("thread", "undefined"))) static void run() {
        simt_worker* w = simt_me;
        while (w->next < w->threads) {
            w->current = w->next++;
            *w->index = w->at[w->current] = w->start;
            if (++w->start.x == blockDim.x) {
                w->start.x = 0;
                if (++w->start.y == blockDim.y) { w->start.y = 0; ++w->start.z; }
            }
            call(w->arguments, typename simt_count<sizeof...(A)>::type());
            unsigned t = w->current;
            w->live[t / SIMT_WARP] &= ~(1u << t % SIMT_WARP);
            w->exited++;
            if (w->waiting) simt_exited(w);
        }
    }
    static int parameters(char* letters, int* sizes) {
        char found[] = {simt_letter<A>::value..., 0};
        int bytes[] = {int(sizeof(A))..., 0};
        for (int i = 0; i < int(sizeof...(A)); i++) { letters[i] = found[i]; sizes[i] = bytes[i]; }
        return sizeof...(A);
    }
};

// scope: the kernel's namespace, or nothing. Behind it is its name in C++, with template arguments.
#define SIMT_EXPORT(name, scope, ...)                                                              \
    extern "C" __attribute__((visibility("default"))) void simt_run_##name() {                     \
        simt_launcher<&scope::__VA_ARGS__, decltype(&scope::__VA_ARGS__)>::run();                  \
    }                                                                                              \
    extern "C" __attribute__((visibility("default")))                                              \
    int simt_parameters_##name(char* simt_letters, int* simt_sizes) {                              \
        return simt_launcher<&scope::__VA_ARGS__, decltype(&scope::__VA_ARGS__)>::parameters(      \
            simt_letters, simt_sizes);                                                             \
    }
