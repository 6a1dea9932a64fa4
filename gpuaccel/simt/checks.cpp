// The checks: functions that the compiler's instrumentation calls before each access of a kernel.
//
// An access is looked up among the regions of the launch: tensors, shared memory, the program's own
// variables. Each element of a tensor (4 bytes of it at most) and each byte of shared memory has a
// cell, which keeps who wrote it last, who read it last, and when.
//
// A *race* is two accesses of different threads to the same cell, at least one of them a write,
// without anything that orders them:
//   in one block   a barrier, or __syncwarp() with both lanes in its mask
//   anywhere       __threadfence() and then an atomic operation by the first thread, and an atomic
//                  operation by the second; others of their blocks may do the same, with a barrier
//                  in between
// So a report does not depend on the order in which the threads happened to run. Time counts these
// ordering events, not accesses.
#include "executor.h"
#include <string.h>

enum simt_region_kind { REGION_GLOBAL, REGION_SHARED, REGION_VARIABLE };
// checking.py has the same list.
enum simt_report_kind {
    REPORT_BOUNDS, REPORT_MISALIGNED, REPORT_UNINITIALISED, REPORT_RACE, REPORT_BARRIER,
    REPORT_SHUFFLE, REPORT_NULL, REPORT_FAR, REPORT_DIVISION, REPORT_SHIFT, REPORT_CONST,
    REPORT_INDEX
};
// VOLATILE is a read that may run beside atomic operations, as in a loop with atomicCAS.
enum { READ, WRITE, ATOMIC, VOLATILE };

// thread: 1 + its number in the grid; 0: no thread. The top bit of pc: the access was atomic.
struct record { uint32_t thread, time, pc; };
// near: the last reader before `read` in the same block, in another warp where there is one
// far: the last reader in another block
struct cell { record write, read, near, far; };
static const uint32_t ATOMIC_BIT = 1u << 31;

struct simt_region {
    char *lo, *hi;
    uint64_t zone;                // bytes around it that are still called by its name
    uint32_t kind, granule;       // bytes per cell
    uint32_t readonly, unused;
    cell* cells;
};

struct simt_report {
    int32_t kind, access;         // access: READ, WRITE or ATOMIC
    uint32_t pc, other_pc;        // from the library's start
    uint64_t thread, other_thread;                        // numbers in the grid
    uint64_t address, size;
    int32_t region, other_access;
    uint64_t count;
    const char* file;             // where the compiler told the place itself
    const char* type;
    uint32_t line, mask;
    int64_t value;
};

struct simt_event {
    uint32_t pc, block;
    uint16_t thread, region;
    uint8_t kind, bytes;
    uint16_t unused;
    uint64_t offset;
};

// checking.py fills it.
struct simt_checks {
    simt_region* region;          // in the order of their addresses
    int32_t regions, reports;
    char *base, *end;             // the kernel's library in memory
    char *shared_lo, *shared_hi;  // its shared variables
    uint32_t* published;  // per thread of the grid: until when its writes are known to others
    simt_event* event;
    uint64_t events, event_room, events_lost;
    simt_report report[256];
};

static simt_checks* now;
static uint32_t clock_, barrier_time;
static uint32_t warp_time[SIMT_WARP], lane_time[SIMT_WARP][SIMT_WARP][SIMT_WARP];
static uint32_t fence_time[SIMT_MAX_THREADS], atomic_time[SIMT_MAX_THREADS];
static uint32_t published_at[SIMT_MAX_THREADS], last_atomic;
static bool partial_sync;         // lane_time is in use in this block
static uint64_t first_thread;     // of the block, in the grid
static char *known_lo, *known_hi; // threadIdx and its like
static simt_region* last_found;

extern "C" __attribute__((visibility("default"))) void simt_check_with(simt_checks* checks) {
    now = checks;
    clock_ = 1;
    last_found = 0;
}

static inline worker* me() { return (worker*)simt_me; }
static inline uint32_t offset(void* pc) { return (uint32_t)((char*)pc - now->base) & ~ATOMIC_BIT; }

// ---- reports: one for each place ----

static simt_report* report(int kind, void* pc, uint32_t other_pc = 0) {
    uint32_t at = offset(pc);
    for (int i = 0; i < now->reports; i++) {
        simt_report* r = &now->report[i];
        if (r->kind == kind && r->pc == at && r->other_pc == other_pc) {
            r->count++;
            return 0;
        }
    }
    if (now->reports == 256) return 0;
    simt_report* r = &now->report[now->reports++];
    memset(r, 0, sizeof *r);
    r->kind = kind;
    r->pc = at;
    r->other_pc = other_pc;
    r->thread = first_thread + me()->current;
    r->region = -1;
    r->count = 1;
    return r;
}

static void place(simt_report* r, int region, void* address, size_t size, int access) {
    r->region = region;
    r->address = (uint64_t)address;
    r->size = size;
    r->access = access == VOLATILE ? (int)READ : access;
}

// ---- what orders accesses ----

void check_block(worker* w) {
    first_thread = w->block * w->threads;
    barrier_time = ++clock_;
    memset(warp_time, 0, sizeof warp_time);
    if (partial_sync) memset(lane_time, 0, sizeof lane_time);
    partial_sync = false;
    memset(fence_time, 0, sizeof fence_time);
    memset(atomic_time, 0, sizeof atomic_time);
    memset(published_at, 0, sizeof published_at);
    last_atomic = 0;
    // Shared memory is not initialised: it holds NaN.
    for (int i = 0; i < now->regions; i++) {
        simt_region* r = &now->region[i];
        if (r->kind == REGION_SHARED) memset(r->lo, 0xff, r->hi - r->lo);
    }
    known_lo = known_hi = (char*)&threadIdx;
    char* known[] = {(char*)(&threadIdx + 1), (char*)&blockIdx, (char*)(&blockIdx + 1),
                     (char*)&blockDim, (char*)(&blockDim + 1), (char*)&gridDim,
                     (char*)(&gridDim + 1), (char*)&simt_me, (char*)(&simt_me + 1)};
    for (char* k : known) {
        if (k < known_lo) known_lo = k;
        if (k > known_hi) known_hi = k;
    }
}

void check_barrier(worker* w) {
    void* pc = w->pc[w->barrier[0]];
    for (unsigned i = 1; i < w->arrived; i++)
        if (w->pc[w->barrier[i]] != pc) {
            if (simt_report* r = report(REPORT_BARRIER, w->pc[w->barrier[i]], offset(pc))) {
                r->thread = first_thread + w->barrier[i];
                r->other_thread = first_thread + w->barrier[0];
            }
            break;
        }
    // What one thread has seen, all threads of the block see behind the barrier.
    if (last_atomic >= barrier_time && last_atomic)
        for (unsigned t = 0; t < w->threads; t++) atomic_time[t] = last_atomic;
    barrier_time = ++clock_;
}

void check_syncwarp(worker* w, unsigned warp, unsigned mask) {
    ++clock_;
    if (mask == w->live[warp]) { warp_time[warp] = clock_; return; }
    partial_sync = true;
    for (unsigned a = mask; a; a &= a - 1)
        for (unsigned b = mask; b; b &= b - 1)
            lane_time[warp][__builtin_ctz(a)][__builtin_ctz(b)] = clock_;
}

void simt_fence(void*) { fence_time[me()->current] = ++clock_; }

static bool ordered(const record& r, unsigned t, uint64_t thread) {
    uint64_t other = r.thread - 1;
    if (other == thread) return true;
    if (other >= first_thread) {                          // the same block
        unsigned o = other - first_thread;
        if (r.time < barrier_time) return true;
        if (o / SIMT_WARP == t / SIMT_WARP) {
            unsigned warp = t / SIMT_WARP;
            if (r.time < warp_time[warp]) return true;
            if (partial_sync && r.time < lane_time[warp][o % SIMT_WARP][t % SIMT_WARP]) return true;
        }
        return r.time < now->published[other] && atomic_time[t] > published_at[o];
    }
    // In an earlier block: all its atomics were before ours.
    return r.time < now->published[other] && atomic_time[t];
}

// An atomic operation by thread t publishes its writes before its fence, and those of other threads
// before a fence and a barrier.
static void publish(unsigned t) {
    worker* w = me();
    last_atomic = ++clock_;
    atomic_time[t] = clock_;
    for (unsigned o = 0; o < w->threads; o++)
        if (fence_time[o] && (o == t || fence_time[o] < barrier_time)
            && now->published[first_thread + o] < fence_time[o]) {
            now->published[first_thread + o] = fence_time[o];
            published_at[o] = clock_;
        }
}

// ---- an access ----

static simt_region* find(char* address) {
    if (last_found && address >= last_found->lo && address < last_found->hi) return last_found;
    int lo = 0, hi = now->regions;
    // Find the first region that begins behind the address.
    while (lo < hi) {
        int middle = (lo + hi) / 2;
        if (now->region[middle].lo <= address) lo = middle + 1;
        else hi = middle;
    }
    simt_region* left = lo ? &now->region[lo - 1] : 0;
    simt_region* right = lo < now->regions ? &now->region[lo] : 0;
    if (left && (address < left->hi || address < left->hi + left->zone)) return left;
    if (right && address + right->zone >= right->lo) return right;
    return 0;
}

static void race(const record& other, void* pc, int region, void* address, size_t size, int access,
                 int other_access) {
    if (simt_report* r = report(REPORT_RACE, pc, other.pc & ~ATOMIC_BIT)) {
        place(r, region, address, size, access);
        r->other_thread = other.thread - 1;
        bool was_atomic = other_access == WRITE && other.pc & ATOMIC_BIT;
        r->other_access = was_atomic ? (int)ATOMIC : other_access;
    }
}

static void keep(worker* w, void* pc, int region, int64_t offset_in_it, size_t size, int kind) {
    if (!now->event) return;
    if (now->events == now->event_room) { now->events_lost++; return; }
    simt_event* e = &now->event[now->events++];
    e->pc = offset(pc);
    e->block = (uint32_t)w->block;
    e->thread = (uint16_t)w->current;
    e->region = (uint16_t)region;
    e->kind = (uint8_t)(kind == VOLATILE ? (int)READ : kind);
    e->bytes = (uint8_t)size;
    e->offset = (uint64_t)offset_in_it;
}

static void access(void* pointer, size_t size, int kind, void* pc) {
    char* address = (char*)pointer;
    worker* w = me();
    if (!w || !w->inside || simt_on_stack(w, address)) return;
    if (address >= known_lo && address < known_hi) return;
    w->last_pc = pc;
    // It may wait in a loop for what another thread will write.
    if (kind >= ATOMIC && ++w->looks % 64 == 0) simt_yield(w);
    simt_region* region = find(address);
    if (!region) {
        // Gaps between shared variables, the program's constants, the runtime's own data.
        if (address >= now->shared_lo && address < now->shared_hi) return;
        if (address >= now->base && address < now->end) return;
        if (address >= (char*)w && address < (char*)(w + 1)) return;
        if (simt_in_heap(address)) {
            const char* verbs[] = {"reads", "writes", "atomically updates", "reads"};
            return simt_check_heap(w, address, size, verbs[kind], pc);
        }
        bool null = (size_t)address < 65536;
        if (simt_report* r = report(null ? REPORT_NULL : REPORT_FAR, pc))
            place(r, -1, address, size, kind);
        simt_stop(w, SIMT_CHECK, pc, address, 0);
    }
    int index = region - now->region;
    if (address < region->lo || address + size > region->hi) {
        if (simt_report* r = report(REPORT_BOUNDS, pc)) place(r, index, address, size, kind);
        // Without a zone around it the access would damage a neighbour.
        if (region->zone == 0) simt_stop(w, SIMT_CHECK, pc, address, 0);
        keep(w, pc, index, address - region->lo, size, kind);
        return;
    }
    last_found = region;
    keep(w, pc, index, address - region->lo, size, kind);
    if ((kind == WRITE || kind == ATOMIC) && region->readonly)
        if (simt_report* r = report(REPORT_CONST, pc)) place(r, index, address, size, kind);
    unsigned t = w->current;
    uint64_t thread = first_thread + t;
    record self = {(uint32_t)thread + 1, clock_, offset(pc) | (kind >= ATOMIC ? ATOMIC_BIT : 0)};
    size_t from = (size_t)(address - region->lo) / region->granule;
    size_t to = (size_t)(address + size - 1 - region->lo) / region->granule;
    bool shared = region->kind == REGION_SHARED;
    bool unset = false, raced = false;        // each is reported once per access
    for (size_t i = from; i <= to; i++) {
        cell& c = region->cells[i];
        char* place_of_cell = region->lo + i * region->granule;
        if (shared) {
            // Forget the accesses of earlier blocks.
            if (c.write.thread && c.write.thread - 1 < first_thread) c.write.thread = 0;
            if (c.read.thread && c.read.thread - 1 < first_thread)
                c.read.thread = c.near.thread = 0;
            c.far.thread = 0;
            if (kind != WRITE && !c.write.thread && !unset) {
                unset = true;
                if (simt_report* r = report(REPORT_UNINITIALISED, pc))
                    place(r, index, place_of_cell, size, kind);
            }
        }
        bool both_atomic = kind >= ATOMIC && c.write.pc & ATOMIC_BIT;
        if (!raced && c.write.thread && !ordered(c.write, t, thread) && !both_atomic) {
            raced = true;
            race(c.write, pc, index, place_of_cell, size, kind, WRITE);
        }
        if (kind == READ || kind == VOLATILE) {
            if (c.read.thread && c.read.thread != self.thread) {
                uint32_t ours = (uint32_t)first_thread + 1, warp = (self.thread - ours) / SIMT_WARP;
                if (c.read.thread < ours) c.far = c.read;
                else if ((c.read.thread - ours) / SIMT_WARP != warp || c.near.thread < ours
                         || c.near.time < barrier_time
                         || (c.near.thread - ours) / SIMT_WARP == warp)
                    c.near = c.read;
            }
            c.read = self;
        } else {
            const record* readers[] = {&c.read, &c.near, &c.far};
            for (const record* r : readers)
                if (!raced && r->thread && !ordered(*r, t, thread)
                    && !(kind == ATOMIC && r->pc & ATOMIC_BIT)) {
                    raced = true;
                    race(*r, pc, index, place_of_cell, size, kind, READ);
                    break;
                }
            c.write = self;
            c.read.thread = c.near.thread = c.far.thread = 0;
        }
    }
}

void simt_atomic(void* address, size_t size, void* pc) {
    worker* w = me();
    if ((size_t)address % size) {
        if (simt_report* r = report(REPORT_MISALIGNED, pc)) {
            place(r, -1, address, size, ATOMIC);
            r->value = size;
        }
    }
    access(address, size, ATOMIC, pc);
    publish(w->current);
}

void check_lane(worker* w, unsigned thread, unsigned source, unsigned mask, void* pc) {
    if (simt_report* r = report(REPORT_SHUFFLE, pc)) {
        r->thread = first_thread + thread;
        r->other_thread = first_thread + thread / SIMT_WARP * SIMT_WARP + source;
        r->mask = mask;
        r->value = source;
    }
    (void)w;
}

// ---- what the thread sanitizer's instrumentation calls ----

extern "C" {
#pragma GCC visibility push(default)
#define ACCESS(n)                                                                                  \
    void __tsan_read##n(void* p) { access(p, n, READ, SIMT_PC); }                                  \
    void __tsan_write##n(void* p) { access(p, n, WRITE, SIMT_PC); }                                \
    void __tsan_unaligned_read##n(void* p) { access(p, n, READ, SIMT_PC); }                        \
    void __tsan_unaligned_write##n(void* p) { access(p, n, WRITE, SIMT_PC); }                      \
    void __tsan_volatile_read##n(void* p) { access(p, n, VOLATILE, SIMT_PC); }                     \
    void __tsan_unaligned_volatile_read##n(void* p) { access(p, n, VOLATILE, SIMT_PC); }           \
    void __tsan_unaligned_volatile_write##n(void* p) { access(p, n, WRITE, SIMT_PC); }             \
    void __tsan_volatile_write##n(void* p) { access(p, n, WRITE, SIMT_PC); }                       \
    void __tsan_read_write##n(void* p) { \
        access(p, n, READ, SIMT_PC); \
        access(p, n, WRITE, SIMT_PC); \
    } \
    void __tsan_unaligned_read_write##n(void* p) { \
        access(p, n, READ, SIMT_PC); \
        access(p, n, WRITE, SIMT_PC); \
    }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
void __tsan_read_range(void* p, size_t n) { access(p, n, READ, SIMT_PC); }
void __tsan_write_range(void* p, size_t n) { access(p, n, WRITE, SIMT_PC); }
// Parameters are copied too, from memory of Python's.
static void part_of_copy(const void* p, size_t n, int kind, void* pc) {
    if (me() && me()->inside && n && (find((char*)p) || simt_in_heap(p))) access((void*)p, n, kind, pc);
}
void* __tsan_memcpy(void* to, const void* from, size_t n) {
    part_of_copy(from, n, READ, SIMT_PC);
    part_of_copy(to, n, WRITE, SIMT_PC);
    return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
    part_of_copy(from, n, READ, SIMT_PC);
    part_of_copy(to, n, WRITE, SIMT_PC);
    return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, size_t n) {
    part_of_copy(to, n, WRITE, SIMT_PC);
    return memset(to, value, n);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

// ---- and the undefined-behaviour sanitizer's: these know the place in the source themselves ----

struct place_in_source { const char* file; uint32_t line, column; };
struct type_descriptor { uint16_t kind, info; char name[1]; };
struct mismatch_data {
    place_in_source at;
    type_descriptor* type;
    unsigned char log_alignment, check;
};
struct index_data { place_in_source at; type_descriptor *array, *index; };
struct operation_data { place_in_source at; type_descriptor *left, *right; };

static simt_report* report_at(
    int kind, void* pc, const place_in_source& at, type_descriptor* type, int64_t value) {
    simt_report* r = report(kind, pc);
    if (r) {
        r->file = at.file;
        r->line = at.line;
        r->type = type ? type->name : 0;
        r->value = value;
    }
    return r;
}

void __ubsan_handle_type_mismatch_v1(mismatch_data* data, size_t pointer) {
    size_t alignment = (size_t)1 << data->log_alignment;
    int access = data->check == 1 ? WRITE : READ;
    // An aligned address: it is beyond a shared or local array that was cast.
    if (pointer && !(pointer & (alignment - 1))) {
        report_at(REPORT_INDEX, SIMT_PC, data->at, 0, 0);
        simt_stop(me(), SIMT_CHECK, SIMT_PC, (void*)pointer, 0);
    }
    if (!pointer) {
        if (simt_report* r = report_at(REPORT_NULL, SIMT_PC, data->at, data->type, 0))
            place(r, -1, 0, 0, access);
        simt_stop(me(), SIMT_CHECK, SIMT_PC, 0, 0);
    }
    if (simt_report* r = report_at(REPORT_MISALIGNED, SIMT_PC, data->at, data->type, alignment)) {
        simt_region* region = find((char*)pointer);
        int index = region ? (int)(region - now->region) : -1;
        place(r, index, (void*)pointer, alignment, access);
    }
}
void __ubsan_handle_out_of_bounds(index_data* data, size_t index) {
    report_at(REPORT_INDEX, SIMT_PC, data->at, data->array, (int64_t)(int32_t)index);
    simt_stop(me(), SIMT_CHECK, SIMT_PC, 0, 0);
}
void __ubsan_handle_divrem_overflow(operation_data* data, size_t, size_t by) {
    report_at(REPORT_DIVISION, SIMT_PC, data->at, data->left, (int64_t)by);
    simt_stop(me(), SIMT_CHECK, SIMT_PC, 0, 0);
}
void __ubsan_handle_shift_out_of_bounds(operation_data* data, size_t, size_t by) {
    report_at(REPORT_SHIFT, SIMT_PC, data->at, data->left, (int64_t)(int32_t)by);
}
#pragma GCC visibility pop
}
