// What a kernel's library and the runtime share: the thread's coordinates, and the calls that a kernel makes.
//
// A CUDA thread is a fibre: a stack of its own, once it has to wait. The threads of a block run one after another on one
// operating-system thread, each until it waits or ends; blocks are spread over several. So `threadIdx` and its like are plain
// thread-local variables (a debugger prints them), and a kernel without barriers runs as one tight loop.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifndef SIMT_TLS                  // the fast one needs a little room that a process may have run out of; then build.py takes the other
#define SIMT_TLS __attribute__((tls_model("initial-exec")))
#endif

struct uint3 { unsigned x, y, z; };
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

enum { SIMT_WARP = 32, SIMT_MAX_THREADS = 1024 };

// Collective operations of a warp. `value` is what a lane brings, `argument` the lane it reads from (SHUFFLE only).
enum simt_kind {
    SIMT_SHUFFLE, SIMT_BALLOT, SIMT_ANY, SIMT_ALL, SIMT_SYNCWARP, SIMT_MATCH_ANY, SIMT_MATCH_ALL,
    SIMT_ADD, SIMT_MIN_SIGNED, SIMT_MAX_SIGNED, SIMT_MIN, SIMT_MAX, SIMT_AND, SIMT_OR, SIMT_XOR,
    SIMT_BARRIER, SIMT_BARRIER_COUNT, SIMT_BARRIER_AND, SIMT_BARRIER_OR
};

// The part of a worker (one operating-system thread that runs blocks) that the loop over threads touches.
struct simt_worker {
    unsigned threads;             // of a block
    unsigned next;                // first thread that has not started
    unsigned current;             // the one that runs
    unsigned exited;
    unsigned waiting;             // threads that wait for others
    unsigned live[SIMT_WARP];     // per warp: lanes that have not exited
    uint3 start;                  // threadIdx of `next`
    uint3 at[SIMT_MAX_THREADS];   // threadIdx of each started thread
    void** arguments;             // as cuLaunchKernel takes them
    char* dynamic;                // dynamic shared memory
};

#pragma GCC visibility push(default)
extern "C" {
extern SIMT_TLS __thread uint3 threadIdx, blockIdx;
extern SIMT_TLS __thread dim3 blockDim, gridDim;
extern SIMT_TLS __thread simt_worker* simt_me;

// `pc`: an address in the caller, which becomes a source line in messages.
int simt_barrier(int kind, int predicate, void* pc);                       // __syncthreads and its _count, _and, _or
unsigned long long simt_warp(int kind, unsigned mask, unsigned long long value, int argument, void* pc);
void simt_fence(void* pc);                                                 // __threadfence
void simt_atomic(void* address, size_t size, void* pc);                    // before an atomic operation (checked builds only)
void simt_trap(const char* reason, void* pc);                              // ends the launch
int simt_print(const char* format, ...) __attribute__((format(printf, 1, 2)));
void simt_exited(simt_worker* worker);                                     // a thread ended while others wait
}
#pragma GCC visibility pop

#define SIMT_PC __builtin_return_address(0)

// The loop over a block's threads, and a kernel's parameters as text: p pointer, s struct, n number, each with its size. Types
// are never parsed: the compiler deduces them.
template <class T> struct simt_letter { static constexpr char value = __is_class(T) ? 's' : 'n'; };
template <class T> struct simt_letter<T*> { static constexpr char value = 'p'; };
template <int... I> struct simt_indices {};
template <int N, int... I> struct simt_count : simt_count<N - 1, N - 1, I...> {};
template <int... I> struct simt_count<0, I...> { using type = simt_indices<I...>; };

template <auto K, class F> struct simt_launcher;
template <auto K, class... A> struct simt_launcher<K, void (*)(A...)> {
    template <int... I> static inline __attribute__((always_inline)) void call(void** arguments, simt_indices<I...>) {
        K(*static_cast<A*>(arguments[I])...);
    }
    __attribute__((no_sanitize("thread", "undefined"))) static void run() {
        simt_worker* w = simt_me;
        while (w->next < w->threads) {
            w->current = w->next++;
            threadIdx = w->at[w->current] = w->start;
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

#define SIMT_EXPORT(name)                                                                          \
    extern "C" __attribute__((visibility("default"))) void simt_run_##name() { simt_launcher<&name, decltype(&name)>::run(); } \
    extern "C" __attribute__((visibility("default"))) int simt_parameters_##name(char* letters, int* sizes) {              \
        return simt_launcher<&name, decltype(&name)>::parameters(letters, sizes);                  \
    }
