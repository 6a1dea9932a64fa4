// Runs a grid on the CPU: one fibre per waiting CUDA thread, blocks spread over operating-system
// threads.
//
// The threads of a block run one after another on one stack. Only when a thread has to wait (at a
// barrier or warp function) does the next one get another stack, so kernels that never wait never
// switch.
#include "executor.h"
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

SIMT_TLS __thread uint3 threadIdx, blockIdx;
SIMT_TLS __thread dim3 blockDim, gridDim;
SIMT_TLS __thread simt_worker* simt_me;

// Unused addresses on both sides of the stacks. A 32-bit index can leave a local array by at most
// this distance, so an access there is one far outside of a local array.
#ifdef SIMT_CHECKED
static const size_t LOCAL_REACH = (size_t)1 << 36;
#else
static const size_t LOCAL_REACH = 0;
#endif
static const int MAX_WORKERS = 64;
static int most_workers = MAX_WORKERS;        // fewer where there is no memory for more
static worker* workers[MAX_WORKERS];
static uint64_t next_block, total_blocks;
static volatile int stopping;
static int interrupted;
static pthread_mutex_t fault_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t print_lock = PTHREAD_MUTEX_INITIALIZER;
static worker* printing;          // holds print_lock

// ---- the switch: keep what a called function must preserve, change stacks, return there ----

extern "C" void simt_switch(void** save, void* load);
#if defined(__x86_64__)
asm(".text\n.globl simt_switch\n.hidden simt_switch\n.type simt_switch, @function\nsimt_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n"
    ".size simt_switch, .-simt_switch\n");
static void* fresh_stack(char* top, void (*entry)()) {
    void** sp = (void**)top - 8;
    memset(sp, 0, 8 * sizeof(void*));
    sp[6] = (void*)entry;
    return sp;
}
static void* pc_of(void* context) {
    return (void*)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
}
static uint64_t float_mode() { return __builtin_ia32_stmxcsr(); }
static void set_float_mode(uint64_t mode) { __builtin_ia32_ldmxcsr((unsigned)mode); }
#elif defined(__aarch64__)
asm(".text\n.globl simt_switch\n.hidden simt_switch\n.type simt_switch, %function\nsimt_switch:\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\n"
    "stp x25, x26, [sp, #48]\nstp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\n"
    "stp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\nmov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
    "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\n"
    "ldp x25, x26, [sp, #48]\nldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\n"
    "ldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\nret\n.size simt_switch, .-simt_switch\n");
static void* fresh_stack(char* top, void (*entry)()) {
    void** sp = (void**)top - 20;
    memset(sp, 0, 20 * sizeof(void*));
    sp[11] = (void*)entry;                                // x30, where `ret` goes
    return sp;
}
static void* pc_of(void* context) { return (void*)((ucontext_t*)context)->uc_mcontext.pc; }
static uint64_t float_mode() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static void set_float_mode(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
#else
#error "gpuaccel's simt backend runs on x86-64 and aarch64"
#endif

// ---- who runs next ----

// Queue a thread that waited. It runs when the current thread waits or ends, not before.
static inline void make_ready(worker* w, unsigned t) {
    w->ready[(w->first + w->count++) % SIMT_MAX_THREADS] = t;
    w->kind[t] = -1;
    w->waiting--;
}

static inline unsigned take_ready(worker* w) {
    unsigned t = w->ready[w->first];
    w->first = (w->first + 1) % SIMT_MAX_THREADS;
    w->count--;
    return t;
}

static void fibre();

// Continue on a fresh stack, where job->run() starts the block's next threads.
static void start_fibre(worker* w, void** save) {
    unsigned i = w->starting = w->spare[--w->spares];
    if (i >= w->used) w->used = i + 1;
    // Without the shift the tops of all stacks would share few cache lines.
    simt_switch(save, fresh_stack(w->stacks + i * SLOT + SLOT - (i * 5 & 63) * 64, fibre));
}

// On a GPU, the active lanes are those that execute together. Here lanes run one by one, so a
// thread waits in __activemask() until no other can run. The lanes of its warp that then wait at
// the same pc are active.
static bool release_active(worker* w) {
    if (!w->active) return false;
    for (unsigned t = 0; t < w->next; t++) {
        if (w->kind[t] != SIMT_ACTIVE) continue;
        unsigned first = t / SIMT_WARP * SIMT_WARP, mask = 0;
        for (unsigned o = t; o < first + SIMT_WARP && o < w->next; o++)
            if (w->kind[o] == SIMT_ACTIVE && w->pc[o] == w->pc[t]) mask |= 1u << (o - first);
        for (unsigned rest = mask; rest; rest &= rest - 1) {
            unsigned o = first + __builtin_ctz(rest);
            w->mask[o] = mask;
            make_ready(w, o);
        }
    }
    w->active = 0;
    return true;
}

void simt_yield(worker* w) {
    unsigned me = w->current;
    // The loop that yields may wait for a thread in __activemask(), which the loop itself, as a
    // thread that can run, would keep waiting for ever.
    if (w->active && ++w->yields % 16 == 0) release_active(w);
    if (w->next == w->threads && !w->count && !release_active(w)) return;
    w->ready[(w->first + w->count++) % SIMT_MAX_THREADS] = me;
    if (w->next < w->threads) return start_fibre(w, &w->stack[me]);
    unsigned t = w->current = take_ready(w);
    threadIdx = w->at[t];
    simt_switch(&w->stack[me], w->stack[t]);
}

// Ready threads run before threads that have not started, which would need further stacks.
static void switch_to_next(worker* w, void** save) {
    if (!w->count && w->next == w->threads) release_active(w);
    if (w->count) {
        unsigned t = w->current = take_ready(w);
        threadIdx = w->at[t];
        // release_active() released the waiting thread itself.
        if (save == &w->stack[t]) return;
        simt_switch(save, w->stack[t]);
    } else if (w->next < w->threads) {
        start_fibre(w, save);
    } else {
        // No thread is ready and none is left to start: those that have not ended wait for ever.
        if (w->exited < w->threads) simt_stop(w, SIMT_DEADLOCK, w->pc[w->current], 0, 0);
        simt_switch(save, w->main);
    }
}

static void fibre() {
    worker* w = (worker*)simt_me;
    unsigned stack = w->starting;
    if (w->held) simt_let_go(w);
    w->job->run();                                        // threads, until none is left to start
    w->spare[w->spares++] = stack;
    void* never;
    switch_to_next(w, &never);
    __builtin_unreachable();
}

static inline void wait_for_others(worker* w, int kind, unsigned mask, void* pc) {
    unsigned me = w->current;
    w->kind[me] = kind;
    w->mask[me] = mask;
    w->pc[me] = pc;
    w->waiting++;
    switch_to_next(w, &w->stack[me]);
}

// ---- barriers: every thread that has not ended must arrive ----

static void release_barrier(worker* w) {
#ifdef SIMT_CHECKED
    check_barrier(w);
#endif
    // Waiting threads read these after the next barrier may have started to count.
    w->last_votes = w->votes;
    w->last_arrived = w->arrived;
    for (unsigned i = 0; i < w->arrived; i++)
        if (w->kind[w->barrier[i]] >= 0) make_ready(w, w->barrier[i]);
    w->arrived = w->votes = 0;
}

int simt_barrier(int kind, int predicate, void* pc) {
    worker* w = (worker*)simt_me;
    w->last_pc = pc;
    w->votes += predicate != 0;
    w->barrier[w->arrived++] = w->current;
    if (w->arrived + w->exited < w->threads) wait_for_others(w, kind, 0, pc);
    else {
        // The last thread to arrive does not switch: it releases the others and continues.
        w->pc[w->current] = pc;
        release_barrier(w);
    }
    if (kind == SIMT_BARRIER_COUNT) return w->last_votes;
    if (kind == SIMT_BARRIER_AND) return w->last_votes == w->last_arrived;
    return w->last_votes != 0;
}

unsigned simt_active(void* pc) {
    worker* w = (worker*)simt_me;
    w->last_pc = pc;
    w->active++;
    wait_for_others(w, SIMT_ACTIVE, 0, pc);
    return w->mask[w->current];
}

// ---- warp functions: a group is open until all lanes of its mask that have not ended are there --

static void finish_group(worker* w, unsigned warp_index, unsigned g) {
    warp_state* warp = &w->warp[warp_index];
    warp_group group = warp->group[g];
    warp->group[g] = warp->group[--warp->open];
    unsigned long long total = 0;
    bool first = true;
    for (unsigned rest = group.arrived; rest; rest &= rest - 1) {
        unsigned long long v = warp->value[__builtin_ctz(rest)];
        switch (group.kind) {
            case SIMT_BALLOT: case SIMT_ANY: case SIMT_ALL: total |= v ? rest & -rest : 0; break;
            case SIMT_ADD: total += v; break;
            case SIMT_MIN: total = first || v < total ? v : total; break;
            case SIMT_MAX: total = first || v > total ? v : total; break;
            case SIMT_MIN_SIGNED:
                total = first || (long long)v < (long long)total ? v : total;
                break;
            case SIMT_MAX_SIGNED:
                total = first || (long long)v > (long long)total ? v : total;
                break;
            case SIMT_AND: total = first ? v : total & v; break;
            case SIMT_OR: total |= v; break;
            case SIMT_XOR: total ^= v; break;
            case SIMT_MATCH_ALL:
                if (first) total = 1;
                else if (v != warp->value[__builtin_ctz(group.arrived)]) total = 0;
                break;
        }
        first = false;
    }
    for (unsigned rest = group.arrived; rest; rest &= rest - 1) {
        unsigned lane = __builtin_ctz(rest), t = warp_index * SIMT_WARP + lane;
        unsigned source = warp->argument[lane] & 31;
        unsigned long long result = total;
        if (group.kind == SIMT_SHUFFLE) {
            bool there = group.arrived >> source & 1;
            result = warp->value[there ? source : lane];
#ifdef SIMT_CHECKED
            if (!there) result = check_lane(w, t, source, group.mask, w->pc[t], result);
#endif
        } else if (group.kind == SIMT_MATCH_ANY) {
            result = 0;
            for (unsigned others = group.arrived; others; others &= others - 1)
                if (warp->value[__builtin_ctz(others)] == warp->value[lane])
                    result |= others & -others;
        } else if (group.kind == SIMT_ANY) result = total != 0;
        else if (group.kind == SIMT_ALL) result = total == group.arrived;
        else if (group.kind == SIMT_MATCH_ALL) result = total ? group.arrived : 0;
        warp->result[lane] = result;
        if (w->kind[t] >= 0) make_ready(w, t);
    }
#ifdef SIMT_CHECKED
    if (group.kind == SIMT_SYNCWARP) check_syncwarp(w, warp_index, group.arrived);
#endif
}

unsigned long long simt_warp(
    int kind, unsigned mask, unsigned long long value, int argument, void* pc) {
    worker* w = (worker*)simt_me;
    unsigned t = w->current, lane = t % SIMT_WARP, bit = 1u << lane, g = 0;
    warp_state* warp = &w->warp[t / SIMT_WARP];
    w->last_pc = pc;
    if (!(mask & bit)) simt_stop(w, SIMT_LANE, pc, 0, 0, mask);
    // Lanes of one warp may have diverged into several groups, each with its own mask.
    while (g < warp->open && (warp->group[g].mask != mask || warp->group[g].kind != kind)) g++;
    if (g == warp->open) warp->group[warp->open++] = {mask, 0, kind};
    warp->value[lane] = value;
    warp->argument[lane] = argument;
    warp->group[g].arrived |= bit;
    if (warp->group[g].arrived == (mask & w->live[t / SIMT_WARP])) {
        w->pc[t] = pc;
        finish_group(w, t / SIMT_WARP, g);
    } else wait_for_others(w, kind, mask, pc);
    return warp->result[lane];
}

// A thread that ends counts as arrived: release barriers and warp functions that lack only it.
void simt_exited(simt_worker* base) {
    worker* w = (worker*)base;
    unsigned warp = w->current / SIMT_WARP;
    if (w->arrived && w->arrived + w->exited == w->threads) release_barrier(w);
    for (unsigned g = 0; g < w->warp[warp].open;) {
        warp_group group = w->warp[warp].group[g];
        if (group.arrived == (group.mask & w->live[warp])) finish_group(w, warp, g);
        else g++;
    }
}

// ---- the end of a launch that goes wrong ----

void simt_stop(worker* w, int kind, void* pc, void* address, const char* reason, unsigned mask) {
    w->held = 1;
    pthread_mutex_lock(&fault_lock);
    simt_fault* f = &w->job->fault;
    if (f->kind == SIMT_NONE) {
        f->kind = kind;
        f->thread = w->current;
        f->block = w->block;
        f->pc = pc;
        f->address = address;
        f->last_pc = w->last_pc;
        f->reason = reason;
        f->mask = mask;
        if (kind == SIMT_DEADLOCK)
            for (unsigned t = 0; t < w->threads; t++)
                if (w->kind[t] >= 0)
                    f->waiting[f->waits++] = {t, w->kind[t], w->mask[t], 0, w->pc[t]};
    }
    stopping = 1;
    pthread_mutex_unlock(&fault_lock);
    if (printing == w) {                      // a fault in printf's arguments
        printing = 0;
        pthread_mutex_unlock(&print_lock);
    }
    void* never;
    simt_switch(&never, w->main);
    __builtin_unreachable();
}

void simt_end_late(worker* w) {
    if (interrupted) simt_stop(w, SIMT_INTERRUPTED, w->last_pc, 0, 0);
    simt_stop(w, SIMT_TIME, w->last_pc, 0, 0);
}

void simt_trap(const char* reason, void* pc) {
    simt_stop((worker*)simt_me, SIMT_TRAPPED, pc, 0, reason);
}

// The compiler calls it where a function that returns a value ends without one (RETURNS, build.py).
extern "C" __attribute__((visibility("default"))) void __ubsan_handle_missing_return(void*) {
    simt_trap("a function that returns a value ends without a return statement", SIMT_PC);
}

bool simt_was_used(worker* w, const void* address) {
    return (size_t)((const char*)address - w->stacks) / SLOT < w->used;
}

bool simt_near_stacks(worker* w, const void* address) {
    return (size_t)((const char*)address - w->stacks + w->reach)
        < SLOT * SIMT_MAX_THREADS + 2 * w->reach;
}

void simt_pause(const char* reason, void* pc) {
    worker* w = (worker*)simt_me;
    w->last_pc = pc;
    if (reason && w->next == w->threads && !w->count)
        simt_stop(w, SIMT_TRAPPED, pc, 0, reason);
    simt_yield(w);
}

// ---- the heap of new and malloc ----
// As on a GPU it has 8 MB, and a block stays until it is freed, also after the launch. A freed
// block is used again only when the heap has no other place left, so that a late access to it is
// seen.

static const size_t HEAP = 8 << 20, GRAIN = 16;
struct heap_block {               // in front of its bytes
    size_t size, room;
    heap_block* next;             // in the list of freed blocks
    size_t in_use;
};
static char* heap;
static size_t heap_used;
static heap_block* freed;
static heap_block* owner[HEAP / GRAIN];                   // the block that each grain belongs to
static pthread_mutex_t heap_lock = PTHREAD_MUTEX_INITIALIZER;
static char heap_problem[200];

static void* use_block(heap_block* block, size_t bytes) {
    block->size = bytes;
    block->in_use = 1;
#ifdef SIMT_CHECKED
    memset(block + 1, 0xff, bytes);                       // not initialised: NaN
#endif
    return block + 1;
}

static void* allocate(size_t bytes, size_t alignment) {
    if (!heap) {
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void* memory = mmap(0, HEAP, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (memory == MAP_FAILED) return 0;
        heap = (char*)memory;
    }
    if (bytes > HEAP) return 0;
    if (alignment < GRAIN) alignment = GRAIN;
    // A grain behind the bytes stays unused.
    size_t room = (bytes + GRAIN - 1) / GRAIN * GRAIN + GRAIN;
    size_t data = (heap_used + sizeof(heap_block) + alignment - 1) / alignment * alignment;
    if (data + room <= HEAP) {
        heap_block* block = (heap_block*)(heap + data) - 1;
        block->room = room;
        heap_used = data + room;
        size_t first = ((char*)block - heap) / GRAIN;
        for (size_t i = first; i < heap_used / GRAIN; i++) owner[i] = block;
        return use_block(block, bytes);
    }
    for (heap_block** link = &freed; *link; link = &(*link)->next) {
        heap_block* block = *link;
        if (block->room < room || block->room > 2 * room || (size_t)(block + 1) % alignment)
            continue;
        *link = block->next;
        return use_block(block, bytes);
    }
    return 0;
}

void* simt_allocate(size_t bytes, size_t alignment, void* pc) {
    worker* w = (worker*)simt_me;
    w->last_pc = pc;
    simt_hold(w);
    pthread_mutex_lock(&heap_lock);
    void* data = allocate(bytes, alignment);
    pthread_mutex_unlock(&heap_lock);
    simt_let_go(w);
    return data;
}

bool simt_in_heap(const void* address) {
    return heap && (size_t)((const char*)address - heap) < HEAP;
}

void simt_free(void* data, void* pc) {
    if (!data) return;
    worker* w = (worker*)simt_me;
    const char* problem = 0;
    simt_hold(w);
    pthread_mutex_lock(&heap_lock);
    heap_block* block = 0;
    if (simt_in_heap(data)) block = owner[((char*)data - heap) / GRAIN];
    if (!block || data != block + 1)
        problem = "frees an address that neither new nor malloc returned";
    else if (!block->in_use) problem = "frees a block of the heap a second time";
    else {
        block->in_use = 0;
        block->next = freed;
        freed = block;
    }
    pthread_mutex_unlock(&heap_lock);
    if (problem) simt_stop(w, SIMT_HEAP, pc, data, problem);
    simt_let_go(w);
}

void simt_check_heap(worker* w, const void* address, size_t size, const char* verb, void* pc) {
    heap_block* block = owner[((const char*)address - heap) / GRAIN];
    const char* data = (const char*)(block + 1);
    const char* where = 0;
    if (!block) where = "in the heap, outside of every block";
    else if (!block->in_use) where = "in a block of the heap that was freed";
    else if ((const char*)address < data) where = "in front of a block of the heap";
    else if ((const char*)address + size > data + block->size)
        where = "behind the end of a block of the heap";
    if (!where) return;
    snprintf(heap_problem, sizeof heap_problem, "%s %zu bytes %s", verb, size, where);
    if (block)
        snprintf(heap_problem, sizeof heap_problem,
                 "%s %zu bytes at byte %td %s of %zu bytes (new or malloc)", verb, size,
                 (const char*)address - data, where, block->size);
    simt_stop(w, SIMT_HEAP, pc, (void*)address, heap_problem);
}

static int alarm_signal() { return SIGRTMAX - 3; }
static const int CAUGHT = 6;
static const int FAULTS[CAUGHT] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGINT, SIGTRAP};
static struct sigaction before[CAUGHT];

// Calls the handler that was there before ours; false where there was none.
static bool call_handler_before(
    const struct sigaction& b, int signal, siginfo_t* info, void* context) {
    if (b.sa_flags & SA_SIGINFO) b.sa_sigaction(signal, info, context);
    else if (b.sa_handler != SIG_DFL && b.sa_handler != SIG_IGN) b.sa_handler(signal);
    else return false;
    return true;
}

static void on_signal(int signal, siginfo_t* info, void* context) {
    worker* w = (worker*)simt_me;
    if (signal == alarm_signal()) {
        if (!w) return;                       // a late alarm
        w->late = 1;
        if (w->inside && !w->held) simt_stop(w, SIMT_TIME, pc_of(context), 0, 0);
        return;
    }
    if (signal == SIGINT) {
        // Python's handler is called, and the launch ends in every thread that runs a kernel.
        stopping = 1;
        if (!__atomic_exchange_n(&interrupted, 1, __ATOMIC_SEQ_CST))
            for (int i = 0; i < MAX_WORKERS && workers[i]; i++)
                if (workers[i] != w && workers[i]->running)
                    pthread_kill(workers[i]->thread, SIGINT);
        call_handler_before(before[4], signal, info, context);
        if (w) w->late = 1;
        if (w && w->inside && !w->held) simt_stop(w, SIMT_INTERRUPTED, pc_of(context), 0, 0);
        return;
    }
    if (w && w->inside) {
        size_t offset = (char*)info->si_addr - w->stacks;
        bool guard = offset < SLOT * SIMT_MAX_THREADS && offset % SLOT < GUARD;
        // On x86-64 a misaligned vector is a general protection fault, which has no address.
        bool protection = signal == SIGBUS || (signal == SIGSEGV && info->si_code == SI_KERNEL);
        int kind = SIMT_MEMORY;
        if (signal == SIGFPE) kind = SIMT_DIVISION;
        else if (guard) kind = SIMT_STACK;
        else if (protection) kind = SIMT_MISALIGNED;
        simt_stop(w, kind, pc_of(context), info->si_addr, 0);
    }
    // The fault is not a kernel's: act as if our handler were not there. Without another handler
    // the fault happens again, and ends the process.
    for (int i = 0; i < CAUGHT; i++)
        if (FAULTS[i] == signal && !call_handler_before(before[i], signal, info, context))
            sigaction(signal, &before[i], 0);
}

// ---- a launch ----

static void prepare_block(worker* w, uint64_t block) {
    simt_job* job = w->job;
    w->block = block;
    blockIdx = {unsigned(block % job->grid[0]), unsigned(block / job->grid[0] % job->grid[1]),
                unsigned(block / job->grid[0] / job->grid[1])};
    w->next = w->exited = w->waiting = w->arrived = w->votes = w->first = w->count = 0;
    w->active = w->used = 0;
    w->start = {0, 0, 0};
    for (unsigned i = 0; i * SIMT_WARP < w->threads; i++) {
        unsigned lanes = w->threads - i * SIMT_WARP;
        w->live[i] = lanes >= SIMT_WARP ? ~0u : (1u << lanes) - 1;
        w->warp[i].open = 0;
    }
#ifdef SIMT_CHECKED
    check_block(w);
#endif
}

static void* run_worker(void* argument) {
    worker* w = (worker*)argument;
    simt_job* job = w->job;
    char alternate[1 << 14];
    stack_t ours = {}, theirs;
    ours.ss_sp = alternate;
    ours.ss_size = sizeof alternate;
    sigaltstack(&ours, &theirs);
    // A launch that ends early may do so in a function with a rounding mode of its own.
    const uint64_t mode = float_mode();
    blockDim = dim3(job->block[0], job->block[1], job->block[2]);
    gridDim = dim3(job->grid[0], job->grid[1], job->grid[2]);
    w->threads = job->block[0] * job->block[1] * job->block[2];
    w->index = &threadIdx;
    w->arguments = job->arguments;
    w->dynamic = w->dynamic_memory;
    w->late = w->inside = w->held = 0;
    w->looks = 0;
    w->current = 0;
    w->thread = pthread_self();
    w->running = 1;
    w->last_pc = 0;
    w->spares = 0;
    for (unsigned i = SIMT_MAX_THREADS; i--;) w->spare[w->spares++] = i;
    memset(w->kind, -1, sizeof w->kind);
    simt_me = w;
    timer_t timer;
    bool timed = false;
    if (job->seconds > 0) {
        struct sigevent event = {};
        event.sigev_notify = SIGEV_THREAD_ID;
        event.sigev_signo = alarm_signal();
#ifdef sigev_notify_thread_id
        event.sigev_notify_thread_id = (pid_t)syscall(SYS_gettid);
#else
        event._sigev_un._tid = (pid_t)syscall(SYS_gettid);
#endif
        if ((timed = timer_create(CLOCK_MONOTONIC, &event, &timer) == 0)) {
            struct itimerspec in = {};
            in.it_value.tv_sec = (time_t)job->seconds;
            in.it_value.tv_nsec = (long)((job->seconds - (double)in.it_value.tv_sec) * 1e9) + 1;
            timer_settime(timer, 0, &in, 0);
        }
    }
    const uint64_t share = 1 + total_blocks / (uint64_t)job->workers / 16;
    for (uint64_t block = 0, end = 0; !stopping;) {
        if (block == end) {
            block = __atomic_fetch_add(&next_block, share, __ATOMIC_RELAXED);
            end = block + share < total_blocks ? block + share : total_blocks;
            if (block >= total_blocks) break;
        }
        prepare_block(w, block++);
        // w->main is saved by the first switch. Before it, simt_stop() could not switch back.
        w->held = 1;
        w->inside = 1;
        start_fibre(w, &w->main);
        w->inside = 0;
        w->held = 0;
        if (w->late && !stopping) {
            pthread_mutex_lock(&fault_lock);
            if (job->fault.kind == SIMT_NONE) {
                job->fault.kind = SIMT_TIME;
                job->fault.block = w->block;
            }
            stopping = 1;
            pthread_mutex_unlock(&fault_lock);
        }
    }
    if (timed) timer_delete(timer);
    w->running = 0;
    simt_me = 0;
    set_float_mode(mode);
    sigaltstack(&theirs, 0);
    return 0;
}

static worker* ready_worker(int i, size_t shared) {       // kept between launches, with its stacks
    if (!workers[i]) {
        worker* w = (worker*)calloc(1, sizeof(worker));
        if (!w) return 0;
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        const size_t size = SLOT * SIMT_MAX_THREADS;
        w->reach = LOCAL_REACH;
        void* memory = mmap(0, size + 2 * w->reach, PROT_NONE, flags, -1, 0);
        if (memory == MAP_FAILED) {
            w->reach = 0;
            memory = mmap(0, size, PROT_NONE, flags, -1, 0);
        }
        if (memory == MAP_FAILED) { free(w); return 0; }
        w->stacks = (char*)memory + w->reach;
        bool usable = !mprotect(w->stacks, size, PROT_READ | PROT_WRITE);
        // A process has a limited number of ranges with a protection of their own.
        for (int s = 0; usable && s < SIMT_MAX_THREADS; s++)
            usable = !mprotect(w->stacks + s * SLOT, GUARD, PROT_NONE);
        if (!usable) {
            munmap(memory, size + 2 * w->reach);
            free(w);
            return 0;
        }
        workers[i] = w;
    }
    worker* w = workers[i];
    if (shared > w->dynamic_size) {
        free(w->dynamic_memory);
        w->dynamic_size = 0;
        if (posix_memalign((void**)&w->dynamic_memory, 4096, shared)) {
            w->dynamic_memory = 0;
            return 0;
        }
        w->dynamic_size = shared;
    }
    return w;
}

// One launch at a time per process (driver.py holds a lock). Returns 0, or -1 when there is no
// memory for the stacks.
extern "C" __attribute__((visibility("default"))) int simt_launch(simt_job* job, void* dynamic) {
    next_block = 0;
    total_blocks = (uint64_t)job->grid[0] * job->grid[1] * job->grid[2];
    stopping = interrupted = 0;
    memset(&job->fault, 0, offsetof(simt_fault, waiting));
    if (job->workers > most_workers) job->workers = most_workers;
    for (int i = 0; i < job->workers; i++) {
        worker* w = ready_worker(i, dynamic ? 0 : job->shared);
        if (!w && i == 0) return -1;
        if (!w) {
            job->workers = most_workers = i;
            break;
        }
        w->job = job;
        if (dynamic) w->dynamic_memory = (char*)dynamic;
    }
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < CAUGHT; i++) sigaction(FAULTS[i], &action, &before[i]);
    // This one stays: a late alarm must find a handler. (The checked runtime has its own.)
    sigaction(alarm_signal(), &action, 0);
    pthread_t thread[MAX_WORKERS];
    int started = 1;
    while (started < job->workers
           && pthread_create(&thread[started], 0, run_worker, workers[started]) == 0) started++;
    run_worker(workers[0]);
    for (int i = 1; i < started; i++) pthread_join(thread[i], 0);
    // A signal between two blocks stops the launch without a fault: report that blocks are missing.
    if (__atomic_load_n(&interrupted, __ATOMIC_SEQ_CST) && job->fault.kind == SIMT_NONE)
        job->fault.kind = SIMT_INTERRUPTED;
    for (int i = 0; i < CAUGHT; i++) sigaction(FAULTS[i], &before[i], 0);
    if (dynamic)
        for (int i = 0; i < job->workers; i++) {
            workers[i]->dynamic_memory = 0;
            workers[i]->dynamic_size = 0;
        }
    return 0;
}

// ---- printf: kept, and printed by Python where the cell's output goes ----

static char printed[1 << 18];
static size_t printed_length;

int simt_print(const char* format, ...) {
    va_list list;
    va_start(list, format);
    worker* w = (worker*)simt_me;
    if (w) {
        w->last_pc = SIMT_PC;
        simt_hold(w);
    }
    pthread_mutex_lock(&print_lock);
    printing = w;
    size_t room = sizeof printed - printed_length;
    int n = vsnprintf(printed + printed_length, room, format, list);
    if (n > 0) printed_length += (size_t)n < room ? (size_t)n : room - 1;
    printing = 0;
    pthread_mutex_unlock(&print_lock);
    va_end(list);
    if (w) simt_let_go(w);
    return n;
}

extern "C" __attribute__((visibility("default"))) size_t simt_printed(char** text) {
    size_t n = printed_length;
    *text = printed;
    printed_length = 0;
    return n;
}
