// The checks: functions that the compiler's instrumentation calls before each access of a kernel.
//
// An access is looked up among the regions of the launch: tensors, shared memory, the program's own
// variables. Each element of a tensor (4 bytes of it at most) and each byte of shared memory has a
// cell, which keeps who wrote it last, who read it last, and when.
//
// A *race* is two accesses of different threads to the same cell, at least one of them a write,
// without anything that orders them:
//   in one block   a barrier, or __syncwarp() with both lanes in its mask
//   anywhere       __threadfence() and then an atomic operation or a volatile write by the first
//                  thread, of which an atomic operation or a volatile read of the second one sees
//                  the result; others of their blocks may do the same, with a barrier in between
// So a report does not depend on the order in which the threads happened to run.
//
// Not a race:
//   different bytes of a cell, as two threads write them that share a word
//   the plain read before an atomicCAS of the same thread at the same place: a stale value only
//   makes atomicCAS fail
//   volatile accesses of different blocks, or behind a fence of the writer: flags
// Two threads that write the same value are a note, and so is a cast to an integer that cannot hold
// the number. A plain read that races is a note where all of this holds (checking.py decides):
//   the other access is atomic, or a plain write that writes one and the same value in all the
//   launch: a mark such as `visited[v] = 1`
//   it is in a tensor: threads that share a block's memory have barriers
//   the launch was made again, each such read got the value of another order of the threads, and
//   all results were the same; for each pair of places the two values did differ
#include "executor.h"
#include <string.h>

enum simt_region_kind { REGION_GLOBAL, REGION_SHARED, REGION_VARIABLE };
// checking.py has the same list.
enum simt_report_kind {
    REPORT_BOUNDS, REPORT_MISALIGNED, REPORT_UNINITIALISED, REPORT_RACE, REPORT_BARRIER,
    REPORT_SHUFFLE, REPORT_NULL, REPORT_FAR, REPORT_DIVISION, REPORT_SHIFT, REPORT_CONST,
    REPORT_INDEX, REPORT_SAME_VALUE, REPORT_UNSET_LOCAL, REPORT_HARMLESS,
    REPORT_FOREIGN_LOCAL, REPORT_NO_LOCAL, REPORT_CAST, REPORT_OVERFLOW, REPORT_BENIGN
};
// VOLATILE is a read and VOLATILE_WRITE a write that may run beside atomic operations and each
// other.
enum { READ, WRITE, ATOMIC, VOLATILE, VOLATILE_WRITE };

// thread: 1 + its number in the grid; 0: no thread.
// pc: from the library's start, and in its top bits what kind of access it was and to which of the
// cell's four bytes
struct record { uint32_t thread, time, pc; };
static const uint32_t ATOMIC_BIT = 1u << 31, VOLATILE_BIT = 1u << 30, BYTES = 15u << 26;
static const uint32_t PC = (1u << 26) - 1;
// near: the last reader before `read` in the same block, in another warp where there is one
// far: the last reader in another block
struct cell { record write, read, near, far; };

struct simt_region {
    char *lo, *hi;
    uint64_t zone;                // bytes around it in which an access does no damage
    uint64_t below, above;        // bytes in front of and behind it that are called by its name
    uint32_t kind, granule;       // bytes per cell
    uint32_t readonly;
    uint32_t element;             // bytes of an element; 0: its type is not known
    cell* cells;
    const unsigned char* padding; // for each byte of an element: it is not part of a member
    // In a second launch (see simt_race_pair): the bytes before and after the first one, and its
    // cells.
    const char *before, *after;
    const cell* earlier;
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
    uint32_t column, callers;
    uint32_t caller[6];           // return addresses of the functions that called this one
};

// A plain read that races with a write, by their places in the source. In a second launch such a
// read gets what it would get in another order of the threads: the value before the launch instead
// of the one that it races with, and the value after the first launch instead of an older one.
// tested: times that the two values differed
struct simt_race_pair { uint32_t read, write, tested; };

// A barrier in the source, and what it did in this launch.
struct simt_barrier_use {
    uint32_t pc;
    uint32_t needed;              // it ordered two accesses that nothing else orders
    uint64_t ended;               // 1 + a thread that had ended when others arrived
};

// Until when a thread's writes are known to others, and since when: oldest first, 0 for none.
// released: its last atomic operation or volatile write
struct publication { uint32_t until[4], at[4], released; };

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
    publication* published;       // per thread of the grid
    simt_event* event;
    uint64_t events, event_room, events_lost;
    uint32_t flip;                // invert what is read from an absent lane, or before it is set
    uint32_t pattern;             // what local variables hold before they are set; 0: not known
    uint32_t barriers, pairs;
    simt_race_pair pair[32];
    simt_barrier_use barrier[64];
    simt_report report[256];
};

static simt_checks* now;
// clock_ counts ordering events (barriers, fences, atomic operations), not accesses: all accesses
// between two such events have the same time, and are unordered unless one thread made them.
static uint32_t clock_, barrier_time, previous_barrier_time;
static simt_barrier_use* last_barrier;        // of this block
static uint32_t warp_time[SIMT_WARP], lane_time[SIMT_WARP][SIMT_WARP][SIMT_WARP];
// fence_barrier: the last barrier before a thread's last fence
// seen: the latest atomic operation or volatile write of which a thread has seen the result
static uint32_t fence_time[SIMT_MAX_THREADS], fence_barrier[SIMT_MAX_THREADS];
static uint32_t seen[SIMT_MAX_THREADS], last_seen;
static bool partial_sync, fenced; // lane_time, or fence_time, is in use in this block
static uint64_t first_thread;     // of the block, in the grid
static char *known_lo, *known_hi; // threadIdx and its like
// The region that each pc accessed last: mostly the next one as well, which saves a search.
static simt_region* last_region[4096];

// A write that is about to happen, and what will be known of it afterwards.
struct pending_write {
    bool race;
    simt_report report;
    char old[64];
    char* address;
    size_t size;                  // 0: there is no write to look at
    simt_region* region;
    uint64_t thread;
    void* pc;
    bool waits;                   // for the read of the struct that it copies
    simt_report* read_race;       // the report of its race with a plain read
    uint64_t before;              // first bytes of what an atomic operation may change
    bool atomic;
};
static pending_write pending;
// Volatile reads and atomic operations of the block since something was written last. Above the
// limit its threads wait in loops for what only another block could write.
static uint32_t idle;
static const uint32_t MOST_IDLE = 1 << 24;
// Memory that holds the value of another thread order until a plain read has happened.
static struct { char *address, bytes[16]; size_t size; } replaced;
static bool pattern_read;         // tensors hold the pattern, too: it proves nothing

// pcs of plain reads that an atomicCAS of the same thread at the same address followed.
static uint32_t guesses[64];
static int guess_count;

static bool is_guess(uint32_t pc) {
    for (int i = 0; i < guess_count; i++)
        if (guesses[i] == pc) return true;
    return false;
}

extern "C" __attribute__((visibility("default"))) void simt_check_with(simt_checks* checks) {
    now = checks;
    clock_ = 1;
    memset(last_region, 0, sizeof last_region);
    guess_count = 0;
    pending.race = pattern_read = false;
    pending.size = replaced.size = 0;
    pending.read_race = 0;
}

static inline worker* me() { return (worker*)simt_me; }
static inline uint32_t offset(void* pc) { return (uint32_t)((char*)pc - now->base) & PC; }
static inline bool is_write(int kind) {
    return kind == WRITE || kind == ATOMIC || kind == VOLATILE_WRITE;
}

// Defers the alarm and Ctrl-C while it lives. A check that they interrupt would leave an incomplete
// report or pending write, which the end of the launch reads.
struct undisturbed {
    worker* w;                    // 0: something around it holds already
    explicit undisturbed(worker* current) : w(current && !current->held ? current : 0) {
        if (w) simt_hold(w);
    }
    ~undisturbed() { if (w) simt_let_go(w); }
};

// ---- reports: one for each place ----

// Record the callers of the current function. Kernels and runtime have frame pointers.
static void keep_callers(simt_report* r) {
    worker* w = me();
    void** frame = (void**)__builtin_frame_address(0);
    bool here = false;
    for (int depth = 0; w && depth < 64 && simt_on_stack(w, frame + 1); depth++) {
        char* back = (char*)frame[1];
        if (back >= now->base && back < now->end) {
            if (here && r->callers < 6) r->caller[r->callers++] = offset(back);
            if (offset(back) == r->pc) here = true;
        }
        void** above = (void**)frame[0];
        if (above <= frame) break;
        frame = above;
    }
}

static simt_report* existing(int kind, uint32_t at, uint32_t other_pc) {
    for (int i = 0; i < now->reports; i++) {
        simt_report* r = &now->report[i];
        if (r->kind == kind && r->pc == at && r->other_pc == other_pc) return r;
    }
    return 0;
}

// A new report; 0: the place has one already, which counts this.
static simt_report* report_of(int kind, uint32_t at, uint32_t other_pc) {
    if (simt_report* r = existing(kind, at, other_pc)) {
        r->count++;
        return 0;
    }
    if (now->reports == 256) return 0;
    simt_report* r = &now->report[now->reports++];
    memset(r, 0, sizeof *r);
    r->kind = kind;
    r->pc = at;
    r->other_pc = other_pc;
    // After the last thread has ended there is no current one.
    if (me()) r->thread = first_thread + me()->current;
    r->region = -1;
    r->count = 1;
    keep_callers(r);
    return r;
}
__attribute__((noinline, cold))
static simt_report* report(int kind, void* pc, uint32_t other_pc = 0) {
    return report_of(kind, offset(pc), other_pc);
}

static void place(simt_report* r, int region, void* address, size_t size, int access) {
    r->region = region;
    r->address = (uint64_t)address;
    r->size = size;
    r->access = access == VOLATILE ? (int)READ : access == VOLATILE_WRITE ? (int)WRITE : access;
}

static inline bool holds_pattern(const char* address, size_t size) {
    if (!now->pattern || size < 4 || size > 16) return false;
    for (size_t i = 0; i + 4 <= size; i += 4)
        if (memcmp(address + i, &now->pattern, 4)) return false;
    return true;
}

static inline bool begins_with_pattern(const char* address, size_t size) {
    if (size >= 4) return !memcmp(address, &now->pattern, 4);
    return !memcmp(address, &now->pattern, 1) && !memcmp(address, &now->pattern, size);
}

static void invert(char* address, size_t size) {
    for (size_t i = 0; i < size; i++) address[i] = ~address[i];
}

// Record the value of a write that raced with a plain read. A race is benign only if all such
// writes have one value.
enum { VALUE_KNOWN = 1, VALUES_DIFFER = 2 };
static void keep_value(simt_report* r, const char* address, size_t size) {
    uint64_t value = 0;
    memcpy(&value, address, size < sizeof value ? size : sizeof value);
    bool differs = r->mask & VALUE_KNOWN && (uint64_t)r->value != value;
    r->value = (int64_t)value;
    r->mask |= VALUE_KNOWN | (differs || size > sizeof value ? VALUES_DIFFER : 0);
}

static void restore_read() {
    memcpy(replaced.address, replaced.bytes, replaced.size);
    replaced.size = 0;
}

// The relaunch gives a racing read the value of the other thread order: the value before the launch
// if it ran after the write, and the value after the first launch if it ran before it.
// racing: the write that races with the read, or 0
static void replace_read(
    const simt_region* region, char* address, size_t size, uint32_t reader, uint32_t pc,
    const record* racing) {
    if (size > sizeof replaced.bytes || !region->before) return;
    size_t at = address - region->lo;
    const char* other = region->before + at;
    if (!racing) {
        // No write has raced yet. The first launch tells if another thread will write here.
        racing = &region->earlier[at / region->granule].write;
        if (!racing->thread || racing->thread == reader || memcmp(address, other, size)) return;
        other = region->after + at;
    }
    for (uint32_t i = 0; i < now->pairs; i++) {
        simt_race_pair* p = &now->pair[i];
        if (p->read != pc || p->write != (racing->pc & PC) || !memcmp(address, other, size))
            continue;
        p->tested++;
        replaced.address = address;
        replaced.size = size;
        memcpy(replaced.bytes, address, size);
        memcpy(address, other, size);
        return;
    }
}

// The instrumentation announces a write before it happens, so its value can be read only at the
// next event. Every event begins with this.
static void finish_write() {
    if (replaced.size) restore_read();
    size_t kept = pending.size < sizeof pending.before ? pending.size : sizeof pending.before;
    if (kept && (!pending.atomic || memcmp(&pending.before, pending.address, kept))) idle = 0;
    if (pending.read_race) keep_value(pending.read_race, pending.address, pending.size);
    pending.read_race = 0;
    if (pending.size && holds_pattern(pending.address, pending.size) && !pattern_read) {
        if (simt_report* r = report(REPORT_UNSET_LOCAL, pending.pc)) {
            place(r, pending.region - now->region, pending.address, pending.size, WRITE);
            r->thread = pending.thread;
            r->callers = 0;
        }
        bool shared = pending.region->kind == REGION_SHARED;
        if (now->flip && shared) invert(pending.address, pending.size);
    }
    pending.size = 0;
    if (!pending.race) return;
    pending.race = false;
    simt_report* p = &pending.report;
    size_t size = p->size;
    bool same = size <= sizeof pending.old && !memcmp(pending.old, (char*)p->value, size);
    simt_report* r = report_of(same ? REPORT_SAME_VALUE : REPORT_RACE, p->pc, p->other_pc);
    if (!r) return;
    int kind = r->kind;
    *r = *p;
    r->kind = kind;
    r->value = 0;
}

// Finish the pending write, unless this access is the read of a struct copy. The instrumentation
// announces the copy's write first, then its read; the memory is written after both.
static bool settle(worker* w, char* address, size_t size, int kind) {
    undisturbed check(w);
    bool apart = address + size <= pending.address || address >= pending.address + pending.size;
    bool is_copy = kind == READ && pending.waits && size == pending.size && apart;
    pending.waits = false;
    if (!is_copy) finish_write();
    return is_copy;
}

// At the end of a launch: reports of what turned out to be harmless are taken back.
extern "C" __attribute__((visibility("default"))) void simt_checked(simt_checks* checks) {
    finish_write();
    for (int i = 0; i < checks->reports; i++) {
        simt_report* r = &checks->report[i];
        if (r->kind != REPORT_RACE) continue;
        bool reads = r->access == READ && r->other_access == ATOMIC && is_guess(r->pc);
        bool was_read = r->access == ATOMIC && r->other_access == READ && is_guess(r->other_pc);
        if (reads || was_read) r->kind = REPORT_HARMLESS;
    }
}

// ---- what orders accesses ----

// A new block: its threads have seen nothing, and no barrier or fence of an earlier block counts.
void check_block(worker* w) {
    finish_write();
    idle = 0;
    last_barrier = 0;
    first_thread = w->block * w->threads;
    barrier_time = ++clock_;
    memset(warp_time, 0, sizeof warp_time);
    if (partial_sync) memset(lane_time, 0, sizeof lane_time);
    partial_sync = false;
    if (fenced) memset(fence_time, 0, sizeof fence_time);
    fenced = false;
    memset(seen, 0, sizeof seen);
    last_seen = 0;
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

static void keep_barrier(worker* w, uint32_t pc) {
    uint32_t i = 0;
    while (i < now->barriers && now->barrier[i].pc != pc) i++;
    if (i == now->barriers) {
        if (i == 64) i--;
        else now->barrier[now->barriers++] = {pc, 0, 0};
    }
    last_barrier = &now->barrier[i];
    int kind = w->kind[w->barrier[0]];
    bool votes = kind >= SIMT_BARRIER_COUNT && kind <= SIMT_BARRIER_OR;
    if (w->threads == 1 || votes || w->arrived == 1) last_barrier->needed = 1;
    for (unsigned t = 0; w->exited && t < w->threads && !last_barrier->ended; t++) {
        bool has_ended = !(w->live[t / SIMT_WARP] >> t % SIMT_WARP & 1);
        if (has_ended) last_barrier->ended = 1 + first_thread + t;
    }
}

void check_barrier(worker* w) {
    undisturbed check(w);
    finish_write();
    idle = 0;
    void* pc = w->pc[w->barrier[0]];
    for (unsigned i = 1; i < w->arrived; i++)
        if (w->pc[w->barrier[i]] != pc) {
            if (simt_report* r = report(REPORT_BARRIER, w->pc[w->barrier[i]], offset(pc))) {
                r->thread = first_thread + w->barrier[i];
                r->other_thread = first_thread + w->barrier[0];
            }
            break;
        }
    keep_barrier(w, offset(pc));
    // A barrier makes what one thread has seen visible to all threads of the block.
    for (unsigned t = 0; t < w->threads; t++)
        if (seen[t] != last_seen) {
            seen[t] = last_seen;
            last_barrier->needed = 1;
        }
    previous_barrier_time = barrier_time;
    barrier_time = ++clock_;
}

void check_syncwarp(worker* w, unsigned warp, unsigned mask) {
    undisturbed check(w);
    finish_write();
    ++clock_;
    uint32_t latest = 0;
    for (unsigned rest = mask; rest; rest &= rest - 1) {
        uint32_t time = seen[warp * SIMT_WARP + __builtin_ctz(rest)];
        if (time > latest) latest = time;
    }
    for (unsigned rest = mask; rest; rest &= rest - 1)
        seen[warp * SIMT_WARP + __builtin_ctz(rest)] = latest;
    // One time per warp is enough for a full mask. A partial mask orders pairs of lanes.
    if (mask == w->live[warp]) { warp_time[warp] = clock_; return; }
    partial_sync = true;
    for (unsigned a = mask; a; a &= a - 1)
        for (unsigned b = mask; b; b &= b - 1)
            lane_time[warp][__builtin_ctz(a)][__builtin_ctz(b)] = clock_;
}

void simt_fence(void*) {
    undisturbed check(me());
    finish_write();
    unsigned t = me()->current;
    fenced = true;
    fence_time[t] = ++clock_;
    fence_barrier[t] = barrier_time;
}

static void add_publication(publication* p, uint32_t until, uint32_t at) {
    int i = 0;
    while (i < 4 && p->until[i]) i++;
    if (i > 0 && until <= p->until[i - 1]) return;
    if (i == 4) {
        // Merge the two oldest: the later `until` with the earlier `at`. This can miss a race, but
        // reports no false one.
        p->until[0] = p->until[1];
        for (i = 1; i < 3; i++) {
            p->until[i] = p->until[i + 1];
            p->at[i] = p->at[i + 1];
        }
    }
    p->until[i] = until;
    p->at[i] = at;
}

__attribute__((noinline))
static bool is_published(const publication& p, uint32_t time, uint32_t seen_by_reader) {
    for (int i = 0; i < 4; i++)
        if (time < p.until[i] && seen_by_reader >= p.at[i]) return true;
    return false;
}

// Whether an earlier access is ordered before one of thread t now. In one block, a later barrier or
// __syncwarp() of the warp orders them. Otherwise the first thread must have published the access,
// and t must have seen that.
static inline __attribute__((always_inline))
bool ordered(const record& r, unsigned t, uint64_t thread) {
    uint64_t other = r.thread - 1;
    if (other == thread) return true;
    if (other >= first_thread) {                          // the same block
        unsigned o = other - first_thread;
        if (o / SIMT_WARP == t / SIMT_WARP) {
            unsigned warp = t / SIMT_WARP;
            if (r.time < warp_time[warp]) return true;
            if (partial_sync && r.time < lane_time[warp][o % SIMT_WARP][t % SIMT_WARP]) return true;
        }
        if (r.time < barrier_time) {
            // No older barrier orders it, so this one is not redundant.
            if (r.time >= previous_barrier_time) last_barrier->needed = 1;
            return true;
        }
    }
    return is_published(now->published[other], r.time, seen[t]);
}

// An atomic operation or volatile write by thread t publishes its writes before its fence, and
// of other threads before a barrier and its fence, or before a fence and a barrier.
static void publish(unsigned t) {
    worker* w = me();
    ++clock_;
    if (last_barrier) last_barrier->needed = 1;
    for (unsigned o = 0; fenced && o < w->threads; o++) {
        // t's own writes: those before its fence. Another thread's: those before the barrier that
        // t's fence follows, as in `write; __syncthreads(); if (t == 0) { fence; atomicAdd }`.
        uint32_t until = o == t ? fence_time[t] : fence_time[t] ? fence_barrier[t] : 0;
        // Or o fenced its own writes, and a barrier or __syncwarp() let t continue after that.
        bool in_step = fence_time[o] < barrier_time
            || (o / SIMT_WARP == t / SIMT_WARP && fence_time[o] < warp_time[t / SIMT_WARP]);
        if (in_step && fence_time[o] > until) until = fence_time[o];
        if (until) add_publication(&now->published[first_thread + o], until, clock_);
    }
    now->published[first_thread + t].released = clock_;
}

// Thread t reads the result of an atomic operation or volatile write: it acquires all that the
// writer had published by then.
static void see(unsigned t, const record& write) {
    if (!write.thread || !(write.pc & (ATOMIC_BIT | VOLATILE_BIT))) return;
    if (write.time > seen[t]) seen[t] = write.time;
    if (write.time > last_seen) last_seen = write.time;
}

// Whether two accesses may run beside each other, as those to a flag or a counter do.
static bool both_synchronise(const record& other, unsigned t, int kind) {
    bool is_atomic = other.pc & ATOMIC_BIT;
    if (kind == READ || kind == WRITE || !(is_atomic || other.pc & VOLATILE_BIT)) return false;
    uint64_t o = other.thread - 1;
    if ((is_atomic && kind != VOLATILE_WRITE) || kind == ATOMIC) return true;
    // If t has already seen a later release by o, the older volatile write is data, not a flag: it
    // must be ordered by a fence.
    uint32_t released = now->published[o].released;
    if (o < first_thread) return !(released > other.time && seen[t] >= released);
    // In one block a volatile access is a flag only beside a fence. Otherwise it is data, and needs
    // a barrier.
    return fence_time[t] > barrier_time || fence_time[o - first_thread] > barrier_time;
}

// ---- an access ----

static simt_region* find(char* address) {
    int lo = 0, hi = now->regions;
    // Binary search for the first region that begins after the address.
    while (lo < hi) {
        int middle = (lo + hi) / 2;
        if (now->region[middle].lo <= address) lo = middle + 1;
        else hi = middle;
    }
    simt_region* left = lo ? &now->region[lo - 1] : 0;
    simt_region* right = lo < now->regions ? &now->region[lo] : 0;
    if (left && address < left->hi + left->above) return left;
    if (right && address + right->below >= right->lo) return right;
    return 0;
}

// Record a race and return its report. Two plain writes may write the same value, which is known
// only after the write: their report waits in `pending`.
__attribute__((noinline, cold))
static simt_report* race(const record& other, void* pc, simt_region* region, char* address,
                         size_t size, int access, int other_access, bool may_be_same) {
    uint32_t other_pc = other.pc & PC;
    if (other_access == WRITE && other.pc & ATOMIC_BIT) other_access = ATOMIC;
    simt_report* r = &pending.report;
    if (may_be_same) {
        memset(r, 0, sizeof *r);
        r->pc = offset(pc);
        r->other_pc = other_pc;
        r->thread = first_thread + me()->current;
        r->count = 1;
        keep_callers(r);
    } else {
        r = report(REPORT_RACE, pc, other_pc);
        if (!r) return existing(REPORT_RACE, offset(pc), other_pc);
    }
    place(r, region - now->region, address, size, access);
    r->other_thread = other.thread - 1;
    r->other_access = other_access;
    return r;
}

static void keep(worker* w, void* pc, int region, int64_t offset_in_it, size_t size, int kind) {
    if (!now->event) return;
    if (now->events == now->event_room) { now->events_lost++; return; }
    simt_event* e = &now->event[now->events++];
    e->pc = offset(pc);
    e->block = (uint32_t)w->block;
    e->thread = (uint16_t)w->current;
    e->region = (uint16_t)region;
    e->kind = (uint8_t)(kind == VOLATILE ? (int)READ : kind == VOLATILE_WRITE ? (int)WRITE : kind);
    e->bytes = (uint8_t)size;
    e->offset = (uint64_t)offset_in_it;
}

static inline uint32_t bytes_of(char* first, size_t size, char* cell, uint32_t granule) {
    int from = first > cell ? (int)(first - cell) : 0;
    int to = first + size < cell + granule ? (int)(first + size - cell) : (int)granule;
    return ((1u << to) - (1u << from)) << 26 & BYTES;
}

// Whether an access hits what is between two functions' variables, where a called function's frame
// pointer and return address are kept, or what is above the kernel: then a local array was left.
static bool is_between_frames(char* address, size_t size) {
    void** frame = (void**)__builtin_frame_address(0);
    for (void** below = 0; frame > below; frame = (void**)frame[0]) {
        if (address + size <= (char*)frame) return false;
        if (address < (char*)(frame + 2)) return true;
        below = frame;
    }
    return true;
}

// certain: no thread ever had it as a local variable
static void leave_locals(worker* w, char* address, size_t size, int kind, void* pc, bool certain) {
    if (simt_report* r = report(REPORT_NO_LOCAL, pc)) {
        place(r, -1, address, size, kind);
        r->mask = certain;
    }
    simt_stop(w, SIMT_CHECK, pc, address, 0);
}

// Whether an access is of a local variable in use, and reads none that is not set.
static inline __attribute__((always_inline))
bool is_quiet_local(worker* w, char* address, size_t size, int kind) {
    char* stack = (char*)__builtin_frame_address(0);
    char* end = w->stacks + ((stack - w->stacks) / SLOT + 1) * SLOT;
    return address >= stack && address < end && (is_write(kind) || !holds_pattern(address, size))
        && !is_between_frames(address, size);
}

// A local variable or array.
__attribute__((noinline))
static void access_local(worker* w, char* address, size_t size, int kind, void* pc) {
    char* stack = (char*)__builtin_frame_address(0);
    if (!simt_same_stack(w, address, stack)) {
        if (!simt_was_used(w, address)) leave_locals(w, address, size, kind, pc, true);
        if (simt_report* r = report(REPORT_FOREIGN_LOCAL, pc)) place(r, -1, address, size, kind);
    } else if (address < stack) {
        // Below all frames in use.
        leave_locals(w, address, size, kind, pc, false);
    } else if (is_between_frames(address, size)) {
        leave_locals(w, address, size, kind, pc, true);
    } else if (!is_write(kind) && holds_pattern(address, size) && !pattern_read) {
        if (simt_report* r = report(REPORT_UNSET_LOCAL, pc)) place(r, -1, address, size, kind);
        if (now->flip) invert(address, size);
    }
}

// The region of an access; null where there is nothing more to check.
static simt_region* locate(worker* w, char* address, size_t size, int kind, void* pc) {
    simt_region* region = find(address);
    if (!region) {
        // Gaps between shared variables, the program's constants, the runtime's own data.
        if (address >= now->shared_lo && address < now->shared_hi) return 0;
        if (address >= now->base && address < now->end) return 0;
        if (address >= (char*)w && address < (char*)(w + 1)) return 0;
        if (simt_in_heap(address)) {
            const char* verbs[] = {"reads", "writes", "atomically updates", "reads", "writes"};
            simt_check_heap(w, address, size, verbs[kind], pc);
            return 0;
        }
        if (simt_near_stacks(w, address)) leave_locals(w, address, size, kind, pc, true);
        bool null = (size_t)address < 65536;
        if (simt_report* r = report(null ? REPORT_NULL : REPORT_FAR, pc))
            place(r, -1, address, size, kind);
        simt_stop(w, SIMT_CHECK, pc, address, 0);
    }
    int index = region - now->region;
    bool outside = address < region->lo || address + size > region->hi;
    if (outside) {
        if (simt_report* r = report(REPORT_BOUNDS, pc)) place(r, index, address, size, kind);
        // Without a zone around it the access would damage a neighbour.
        if (region->zone == 0 || address + size > region->hi + region->zone
            || address + region->zone < region->lo)
            simt_stop(w, SIMT_CHECK, pc, address, 0);
    }
    keep(w, pc, index, address - region->lo, size, kind);
    if (outside) return 0;
    if (is_write(kind) && region->readonly)
        if (simt_report* r = report(REPORT_CONST, pc)) place(r, index, address, size, kind);
    // A trace keeps all accesses.
    if (!now->event) last_region[(size_t)pc % 4096] = region;
    return region;
}

// Records of up to this thread do not count: in shared memory they are of earlier blocks.
static inline uint32_t oldest_thread(const simt_region* region) {
    return region->kind == REGION_SHARED ? (uint32_t)first_thread : 0;
}

// Record a reader. A write must be ordered after all readers, but a cell keeps three: the last one,
// one of another warp of the same block, and one of another block. A reader that is dropped is of
// the same warp or block as one that stays, so the same barrier or fence mostly orders both.
static inline void add_reader(cell& c, const record& self, uint32_t oldest) {
    if (c.read.thread > oldest && c.read.thread != self.thread) {
        uint32_t ours = (uint32_t)first_thread + 1, warp = (self.thread - ours) / SIMT_WARP;
        if (c.read.thread < ours) c.far = c.read;
        else if ((c.read.thread - ours) / SIMT_WARP != warp || c.near.thread < ours
                 || c.near.time < barrier_time || (c.near.thread - ours) / SIMT_WARP == warp)
            c.near = c.read;
    }
    c.read = self;
}

// The fast path of nearly all accesses: whole cells, and nothing to report. Updates the cells as it
// goes. On false check_access() repeats all of them; updating a cell twice changes nothing.
template <int kind> static inline __attribute__((always_inline))
bool is_quiet(simt_region* region, char* address, size_t size, unsigned t, record self) {
    size_t at = address - region->lo;
    uint32_t granule = region->granule;
    if ((at | size) & (granule - 1)) return false;
    bool shared = region->kind == REGION_SHARED;
    uint32_t oldest = oldest_thread(region);
    uint64_t thread = first_thread + t;
    int shift = __builtin_ctz(granule);
    self.pc |= ((1u << granule) - 1) << 26;
    cell *c = &region->cells[at >> shift], *end = c + (size >> shift);
    // The next threads access the cells after these.
    __builtin_prefetch(c + 4, 1);
    do {
        bool written = c->write.thread > oldest;
        if (written && !ordered(c->write, t, thread)) return false;
        if (kind == READ) {
            if (shared && !written) return false;
            add_reader(*c, self, oldest);
            continue;
        }
        const record* readers[] = {&c->read, &c->near, &c->far};
        for (const record* r : readers)
            if (r->thread > oldest && !ordered(*r, t, thread)) return false;
        c->write = self;
        c->read.thread = c->near.thread = c->far.thread = 0;
    } while (++c != end);
    return kind == WRITE ? !region->readonly : !begins_with_pattern(address, size);
}

// Record a write that is about to happen, for finish_write(). `size` is set last: a signal handler
// that ends the launch between must not find an incomplete record.
static inline void wait_for_write(simt_region* region, char* address, size_t size, int kind,
                                  unsigned t, void* pc) {
    pending.address = address;
    pending.region = region;
    pending.thread = first_thread + t;
    pending.pc = pc;
    pending.waits = kind == WRITE;
    pending.read_race = 0;
    pending.atomic = false;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    pending.size = size;
}

// The slow path: compare with each cell's records, report, and update the cells.
template <int kind> __attribute__((noinline))
static void check_access(worker* w, char* address, size_t size, void* pc, bool is_copy) {
    undisturbed check(w);
    if (simt_on_stack(w, address)) return access_local(w, address, size, kind, pc);
    // The thread may spin until another one writes. Threads are not preempted, so let others run.
    if ((kind == ATOMIC || kind == VOLATILE) && ++w->looks % 64 == 0) {
        simt_let_go(w);
        simt_yield(w);
        simt_hold(w);
        idle += 64;
        if (idle > MOST_IDLE) simt_stop(w, SIMT_SPIN, pc, address, 0);
    }
    simt_region* region = locate(w, address, size, kind, pc);
    if (!region) return;
    unsigned t = w->current;
    uint64_t thread = first_thread + t;
    if (kind == ATOMIC || kind == VOLATILE_WRITE) publish(t);
    uint32_t flags = kind == ATOMIC ? ATOMIC_BIT : kind >= VOLATILE ? VOLATILE_BIT : 0;
    record self = {(uint32_t)thread + 1, clock_, offset(pc) | flags};
    uint32_t granule = region->granule;
    size_t from = (size_t)(address - region->lo) / granule;
    size_t to = (size_t)(address + size - 1 - region->lo) / granule;
    bool shared = region->kind == REGION_SHARED;
    uint32_t oldest = oldest_thread(region);
    bool raced = false;                       // it is reported once per access
    const record* racing_write = 0;
    simt_report* read_race = 0;               // of a plain write and a plain read
    char *unset = 0, *set = 0;                // a byte that nobody, or somebody, has written
    for (size_t i = from; i <= to; i++) {
        cell& c = region->cells[i];
        char* place_of_cell = region->lo + i * granule;
        uint32_t bytes = bytes_of(address, size, place_of_cell, granule);
        self.pc = (self.pc & ~BYTES) | bytes;
        bool written = c.write.thread > oldest;
        if (shared) {
            bool is_padding = region->padding && region->padding[i % region->element];
            if (!written && !is_padding && !unset) unset = place_of_cell;
            if (written) set = place_of_cell;
        }
        // Before the comparison: what this access acquires may order it after the write.
        if (written && (kind == ATOMIC || kind == VOLATILE)) see(t, c.write);
        if (!raced && written && c.write.pc & bytes && !both_synchronise(c.write, t, kind)
            && !ordered(c.write, t, thread)) {
            raced = true;
            bool two_writes = is_write(kind) && kind != ATOMIC && !(c.write.pc & ATOMIC_BIT);
            simt_report* r = race(
                c.write, pc, region, place_of_cell, size, kind, WRITE, two_writes);
            pending.race |= two_writes;
            racing_write = &c.write;
            if (kind == READ && !(c.write.pc & (ATOMIC_BIT | VOLATILE_BIT))) read_race = r;
        }
        if (!is_write(kind)) {
            add_reader(c, self, oldest);
        } else {
            const record* readers[] = {&c.read, &c.near, &c.far};
            for (const record* r : readers)
                if (!raced && r->thread > oldest && r->pc & bytes && !both_synchronise(*r, t, kind)
                    && !ordered(*r, t, thread)) {
                    raced = true;
                    // The reader had written the cell itself, so this is a race of two writes.
                    bool own = kind == WRITE && c.write.thread == r->thread;
                    simt_report* found = race(
                        *r, pc, region, place_of_cell, size, kind, READ, own);
                    pending.race = own;
                    if (kind == WRITE && !own && !(r->pc & VOLATILE_BIT)) read_race = found;
                    break;
                }
            // The write is compared with these readers now, and later accesses with the write.
            c.write = self;
            c.read.thread = c.near.thread = c.far.thread = 0;
        }
    }
    if (is_write(kind)) {
        wait_for_write(region, address, size, kind, t, pc);
        pending.read_race = read_race;
        pending.atomic = kind == ATOMIC;
        size_t kept = size < sizeof pending.before ? size : sizeof pending.before;
        if (pending.atomic) memcpy(&pending.before, address, kept);
    } else if (begins_with_pattern(address, size)) pattern_read = true;
    // Memory without a type may hold padding of structs: report only if no byte was written.
    bool typed = region->element > 1;
    if (unset && kind != WRITE && kind != VOLATILE_WRITE && (typed || !set)) {
        if (simt_report* r = report(REPORT_UNINITIALISED, pc))
            place(r, region - now->region, unset, size, kind);
        // atomicExch may be the first to set it, and drop what was there.
        if (kind == ATOMIC && now->flip) invert(address, size);
    }
    if (kind == READ && read_race) keep_value(read_race, address, size);
    if (kind == READ && now->pairs)
        replace_read(region, address, size, self.thread, offset(pc), racing_write);
    if (pending.race && !is_copy) {
        pending.report.value = (int64_t)address;
        memcpy(pending.old, address, size < sizeof pending.old ? size : sizeof pending.old);
    }
}

template <int kind> static inline __attribute__((always_inline))
void access(void* pointer, size_t size, void* pc) {
    char* address = (char*)pointer;
    worker* w = me();
    if (!w || !w->inside) return;
    simt_region* region = last_region[(size_t)pc % 4096];
    bool is_there = region && address >= region->lo && address + size <= region->hi;
    if (!is_there && address >= known_lo && address < known_hi) return;
    if (replaced.size) restore_read();
    bool is_copy = pending.size && settle(w, address, size, kind);
    bool quiet = false;
    if (!is_there) quiet = is_quiet_local(w, address, size, kind);
    else if (kind == READ || kind == WRITE) {
        unsigned t = w->current;
        record self = {(uint32_t)first_thread + t + 1, clock_, offset(pc)};
        quiet = is_quiet<kind>(region, address, size, t, self);
        // A relaunch replaces the values of racing reads: replace_read().
        if (kind == READ && now->pairs) quiet = false;
        if (quiet && kind == WRITE) wait_for_write(region, address, size, kind, t, pc);
    }
    w->last_pc = pc;
    if (quiet) return;
    check_access<kind>(w, address, size, pc, is_copy);
}

void simt_atomic(void* address, size_t size, void* pc) {
    undisturbed check(me());
    if ((size_t)address % size) {
        if (simt_report* r = report(REPORT_MISALIGNED, pc)) {
            place(r, -1, address, size, ATOMIC);
            r->value = size;
        }
    }
    access<ATOMIC>(address, size, pc);
}

// atomicCAS after a plain read of the same thread: a stale value only makes it fail, so the read is
// no race.
void simt_atomic_swap(void* address, size_t size, void* pc) {
    worker* w = me();
    undisturbed check(w);
    if (w && w->inside && !simt_on_stack(w, (char*)address)) {
        simt_region* region = find((char*)address);
        if (region && (char*)address >= region->lo && (char*)address < region->hi) {
            size_t i = (size_t)((char*)address - region->lo) / region->granule;
            record read = region->cells[i].read;
            bool own = read.thread == first_thread + w->current + 1;
            bool plain = !(read.pc & (ATOMIC_BIT | VOLATILE_BIT));
            if (own && plain && guess_count < 64 && !is_guess(read.pc & PC))
                guesses[guess_count++] = read.pc & PC;
        }
    }
    simt_atomic(address, size, pc);
}

unsigned long long check_lane(
    worker* w, unsigned thread, unsigned source, unsigned mask, void* pc, unsigned long long own) {
    undisturbed check(w);
    if (simt_report* r = report(REPORT_SHUFFLE, pc)) {
        r->thread = first_thread + thread;
        r->other_thread = first_thread + thread / SIMT_WARP * SIMT_WARP + source;
        r->mask = mask;
        r->value = source;
    }
    return now->flip ? ~own : own;
}

// ---- what the thread sanitizer's instrumentation calls ----

// Parameters are copied too, from memory of Python's.
template <int kind> static void part_of_copy(const void* p, size_t n, void* pc) {
    if (!me() || !me()->inside || !n) return;
    if ((size_t)p >= 65536 && !find((char*)p) && !simt_in_heap(p)) return;
    for (size_t i = 0; i < n; i += 16) access<kind>((char*)p + i, n - i < 16 ? n - i : 16, pc);
}

extern "C" {
#pragma GCC visibility push(default)
#define ACCESS(name, n, kind) void __tsan_##name##n(void* p) { access<kind>(p, n, SIMT_PC); }
#define ACCESSES(n)                                                                                \
    ACCESS(read, n, READ)                                                                          \
    ACCESS(write, n, WRITE)                                                                        \
    ACCESS(unaligned_read, n, READ)                                                                \
    ACCESS(unaligned_write, n, WRITE)                                                              \
    ACCESS(volatile_read, n, VOLATILE)                                                             \
    ACCESS(volatile_write, n, VOLATILE_WRITE)                                                      \
    ACCESS(unaligned_volatile_read, n, VOLATILE)                                                   \
    ACCESS(unaligned_volatile_write, n, VOLATILE_WRITE)                                            \
    void __tsan_read_write##n(void* p) {                                                           \
        access<READ>(p, n, SIMT_PC);                                                               \
        access<WRITE>(p, n, SIMT_PC);                                                              \
    }                                                                                              \
    void __tsan_unaligned_read_write##n(void* p) {                                                 \
        access<READ>(p, n, SIMT_PC);                                                               \
        access<WRITE>(p, n, SIMT_PC);                                                              \
    }
ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)
void __tsan_read_range(void* p, size_t n) { access<READ>(p, n, SIMT_PC); }
void __tsan_write_range(void* p, size_t n) { access<WRITE>(p, n, SIMT_PC); }
void* __tsan_memcpy(void* to, const void* from, size_t n) {
    part_of_copy<READ>(from, n, SIMT_PC);
    part_of_copy<WRITE>(to, n, SIMT_PC);
    return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
    part_of_copy<READ>(from, n, SIMT_PC);
    part_of_copy<WRITE>(to, n, SIMT_PC);
    return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, size_t n) {
    part_of_copy<WRITE>(to, n, SIMT_PC);
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
struct cast_data { place_in_source at; type_descriptor *from, *to; };

static simt_report* report_at(
    int kind, void* pc, const place_in_source& at, type_descriptor* type, int64_t value) {
    simt_report* r = report(kind, pc);
    if (r) {
        r->file = at.file;
        r->line = at.line;
        r->column = at.column;
        r->type = type ? type->name : 0;
        r->value = value;
    }
    return r;
}

void __ubsan_handle_type_mismatch_v1(mismatch_data* data, size_t pointer) {
    undisturbed check(me());
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
    undisturbed check(me());
    report_at(REPORT_INDEX, SIMT_PC, data->at, data->array, (int64_t)(int32_t)index);
    simt_stop(me(), SIMT_CHECK, SIMT_PC, 0, 0);
}
void __ubsan_handle_divrem_overflow(operation_data* data, size_t, size_t by) {
    undisturbed check(me());
    report_at(REPORT_DIVISION, SIMT_PC, data->at, data->left, (int64_t)by);
    simt_stop(me(), SIMT_CHECK, SIMT_PC, 0, 0);
}
// Only in the launch that looks for the reason of a wild index: of each place the last overflow.
static void overflow(operation_data* data, void* pc, size_t left, size_t right, char sign) {
    undisturbed check(me());
    uint32_t at = offset(pc);
    simt_report* r = 0;
    for (int i = 0; i < now->reports && !r; i++)
        if (now->report[i].kind == REPORT_OVERFLOW && now->report[i].pc == at)
            r = &now->report[i];
    if (!r && !(r = report_at(REPORT_OVERFLOW, pc, data->at, data->left, 0))) return;
    r->thread = first_thread + me()->current;
    r->value = (int64_t)left;
    r->address = right;
    r->mask = (uint32_t)sign;
    // Its bits, where it is an integer.
    r->size = data->left->kind == 0 ? 1 << (data->left->info >> 1) : 0;
}
void __ubsan_handle_add_overflow(operation_data* data, size_t left, size_t right) {
    overflow(data, SIMT_PC, left, right, '+');
}
void __ubsan_handle_sub_overflow(operation_data* data, size_t left, size_t right) {
    overflow(data, SIMT_PC, left, right, '-');
}
void __ubsan_handle_mul_overflow(operation_data* data, size_t left, size_t right) {
    overflow(data, SIMT_PC, left, right, '*');
}
void __ubsan_handle_negate_overflow(operation_data* data, size_t value) {
    overflow(data, SIMT_PC, 0, value, '-');
}
void __ubsan_handle_shift_out_of_bounds(operation_data* data, size_t, size_t by) {
    undisturbed check(me());
    report_at(REPORT_SHIFT, SIMT_PC, data->at, data->left, (int64_t)(int32_t)by);
}
// bits: of the number, which is a float or a double.
void __ubsan_handle_float_cast_overflow(cast_data* data, uint64_t bits) {
    undisturbed check(me());
    double number;
    memcpy(&number, &bits, sizeof number);
    if (data->from->info == 32) {
        float single;
        memcpy(&single, &bits, sizeof single);
        number = single;
    }
    bool has_sign = data->to->info & 1;
    int width = 1 << (data->to->info >> 1);
    // A GPU and a CPU convert to 32 bits, and keep the lower ones for a smaller type.
    if (width < 32 && number > (has_sign ? -2147483649.0 : -1.0) && number < 2147483648.0) return;
    memcpy(&bits, &number, sizeof bits);
    report_at(REPORT_CAST, SIMT_PC, data->at, data->to, (int64_t)bits);
}
#pragma GCC visibility pop
}
