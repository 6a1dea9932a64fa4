// The interface of the executor (executor.cpp) and the checks (checks.cpp).
#pragma once
#include <pthread.h>

#define SIMT_EXECUTOR
#include "runtime.h"

enum simt_fault_kind {            // driver.py has the same list
    SIMT_NONE, SIMT_DEADLOCK, SIMT_MEMORY, SIMT_MISALIGNED, SIMT_DIVISION, SIMT_TIME, SIMT_STACK,
    SIMT_LANE, SIMT_TRAPPED, SIMT_CHECK, SIMT_INTERRUPTED, SIMT_HEAP,
    SIMT_SPIN
};

struct simt_wait { uint32_t thread; int32_t kind; uint32_t mask; uint32_t unused; void* pc; };

struct simt_fault {               // why a launch ended early: the first reason counts
    int32_t kind;
    uint32_t thread;              // linear, in its block
    uint64_t block;               // linear
    void* pc;
    void* address;
    void* last_pc;                // the kernel's last call of the runtime
    const char* reason;
    uint32_t waits;               // entries of `waiting`
    uint32_t mask;
    simt_wait waiting[SIMT_MAX_THREADS];
};

struct simt_job {
    void (*run)();                // simt_run_<kernel>
    void** arguments;
    uint32_t grid[3], block[3];
    uint64_t shared;              // bytes of dynamic shared memory
    int32_t workers;
    int32_t unused;
    double seconds;               // time limit; 0: none
    simt_fault fault;
};

// The stacks of a worker's fibres, each above a guard. The system maps a page when it is used.
// The guard consists of whole pages where a page has 4, 16 or 64 KiB, and is as large as compilers
// for ARM expect: they touch each 64 KiB of a large frame (-fstack-clash-protection).
static const size_t GUARD = 64 << 10, STACK = 256 << 10, SLOT = GUARD + STACK;

struct warp_group { unsigned mask, arrived; int kind; };

struct warp_state {
    unsigned open;                            // groups that wait for lanes
    warp_group group[SIMT_WARP];
    unsigned long long value[SIMT_WARP], result[SIMT_WARP];
    int argument[SIMT_WARP];
};

struct worker : simt_worker {
    simt_job* job;
    uint64_t block;                           // linear index of the block that runs
    void* main;                               // stack pointer of the loop over blocks
    void* stack[SIMT_MAX_THREADS];            // stack pointer of each waiting thread
    void* pc[SIMT_MAX_THREADS];               // where it waits,
    int kind[SIMT_MAX_THREADS];               // for what (simt_kind; -1: it does not wait)
    unsigned mask[SIMT_MAX_THREADS];          // and with which lanes
    unsigned short ready[SIMT_MAX_THREADS];   // ring of threads that may go on
    unsigned first, count;
    unsigned short barrier[SIMT_MAX_THREADS]; // threads at the barrier, in order of arrival
    unsigned arrived, votes, last_votes, last_arrived;
    unsigned short spare[SIMT_MAX_THREADS];   // unused stacks
    unsigned spares;
    unsigned used;                            // stacks that threads of this block have had
    unsigned starting;                        // the stack that a new fibre begins on
    char* stacks;
    size_t reach;                             // unused addresses on both sides of them
    pthread_t thread;                         // of the system, while `running`
    volatile int running;
    volatile int inside;                      // a kernel runs on one of our stacks
    volatile int held;                        // no alarm may end it here: see simt_hold
    volatile int late;                        // the time limit passed
    void* last_pc;                            // the kernel's last call of the runtime
    unsigned looks;                           // volatile reads and atomics so far (checked builds)
    unsigned active;                          // threads that wait in __activemask()
    unsigned yields;
    warp_state warp[SIMT_WARP];
    char* dynamic_memory;
    size_t dynamic_size;
};

// Ends the launch: records the reason and switches back to the loop over blocks.
void simt_stop(worker* w, int kind, void* pc, void* address, const char* reason, unsigned mask = 0);
// Between simt_hold and simt_let_go the alarm and Ctrl-C are deferred: a thread that ended there
// would keep a lock, or leave an incomplete report.
void simt_end_late(worker* w);    // ends the launch after a deferred one
inline void simt_hold(worker* w) {
    w->held = 1;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}
inline void simt_let_go(worker* w) {
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    w->held = 0;
    if (w->late) simt_end_late(w);
}
inline bool simt_on_stack(worker* w, const void* address) {
    return (size_t)((const char*)address - w->stacks) < SLOT * SIMT_MAX_THREADS;
}
inline bool simt_same_stack(worker* w, const void* a, const void* b) {
    size_t first = (const char*)a - w->stacks, second = (const char*)b - w->stacks;
    return first / SLOT == second / SLOT;
}
bool simt_was_used(worker* w, const void* address);       // its stack, by a thread of this block
bool simt_near_stacks(worker* w, const void* address);    // near the stacks: see LOCAL_REACH
void simt_yield(worker* w);       // lets another thread of the block run

bool simt_in_heap(const void* address);
// Ends the launch unless these bytes of the heap are in a block that is in use:
void simt_check_heap(worker* w, const void* address, size_t size, const char* verb, void* pc);

#ifdef SIMT_CHECKED
// A block begins:
void check_block(worker* w);
// All threads have arrived:
void check_barrier(worker* w);
// These lanes have reached a __syncwarp():
void check_syncwarp(worker* w, unsigned warp, unsigned mask);
// A shuffle reads a lane that does not take part. Returns the value it gets:
unsigned long long check_lane(
    worker* w, unsigned thread, unsigned source, unsigned mask, void* pc, unsigned long long own);
#endif
