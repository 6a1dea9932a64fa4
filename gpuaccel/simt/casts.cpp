// Casts of floating-point numbers to integers that cannot hold them, as PTX defines cvt.rzi: the
// nearest limit. In C++ such a cast is undefined, and x86-64's cvttss2si gives the lowest integer.
//
// The compiler's instrumentation (-fsanitize=float-cast-overflow) calls the function below in front
// of such a cast only. That computes the result and lets the processor go on step by step, a few
// instructions, until the conversion, which it replaces. So casts within range cost a comparison,
// and those outside some microseconds. Where a step is not possible the cast is the processor's.
#include "executor.h"

#ifdef __x86_64__
#include <string.h>
#include <ucontext.h>

// In a checked build the checks of what is read stand between the call and the conversion.
#ifdef SIMT_CHECKED
static const int MOST_STEPS = 3000;
#else
static const int MOST_STEPS = 200;
#endif
static const unsigned long long TRAP_FLAG = 0x100;

struct simt_cast {                // one per operating-system thread
    uint64_t result;              // what the conversion gives
    uint64_t source;              // the bits that it converts
    bool is_wide;                 // to a register of 64 bits
    int steps;                    // left until we give up; 0: no cast
};
static SIMT_TLS __thread simt_cast cast;

struct number_type { uint16_t kind, info; char name[1]; };            // kind 0: integer, 1: float
struct cast_data { const char* file; uint32_t line, column; number_type *from, *to; };

extern "C" __attribute__((visibility("default")))
void __ubsan_handle_float_cast_overflow(cast_data* data, uint64_t bits) {
    bool is_double = data->from->info == 64;
    float single;
    double x;
    memcpy(&single, &bits, sizeof single);
    memcpy(&x, &bits, sizeof x);
    if (!is_double) x = single;
    bool has_sign = data->to->info & 1;
    // A GPU converts to 32 bits, or 64, and keeps the lower ones.
    bool is_wide = 1 << (data->to->info >> 1) == 64;
    uint64_t most = ~0ull >> (is_wide ? 0 : 32) >> has_sign;
    uint64_t least = has_sign ? ~most : 0;
    // 2 ** 63 and the like, which is one more than `most`.
    double limit = (is_wide ? 18446744073709551616.0 : 4294967296.0) / (has_sign ? 2 : 1);
    // As simt_to_integer in simt.h.
    uint64_t result;
    if (x != x) result = is_wide || is_double ? (is_wide ? 1ull << 63 : 1ull << 31) : 0;
    else if (x >= limit) result = most;
    else if (x <= (has_sign ? -limit : -1.0)) result = least;
    // Only the lower bits do not fit.
    else if (x < 2147483648.0) return;
    else result = (uint64_t)x;
    cast.result = result;
    cast.source = is_double ? bits : (uint32_t)bits;
    if (is_wide && !has_sign && x >= limit) {
        // An unsigned number of 2 ** 63 and more is converted without its top bit.
        x -= limit / 2;
        single = (float)x;
        cast.source = 0;
        if (is_double) memcpy(&cast.source, &x, sizeof x);
        else memcpy(&cast.source, &single, sizeof single);
        cast.result = most >> 1;
    }
    // x86-64 converts to an unsigned number of 32 bits with the instruction for 64.
    cast.is_wide = is_wide || (!has_sign && data->to->info >> 1 == 5);
    cast.steps = MOST_STEPS;
    __builtin_ia32_writeeflags_u64(__builtin_ia32_readeflags_u64() | TRAP_FLAG);
}

// The general registers in the order of their numbers in machine code.
static const int REGISTERS[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                REG_R12, REG_R13, REG_R14, REG_R15};

// The address of an operand in memory; `next` becomes the instruction behind it.
static const char* operand(const greg_t* registers, const uint8_t* modrm, uint8_t rex,
                           const uint8_t** next) {
    int mode = modrm[0] >> 6, base = modrm[0] & 7;
    const uint8_t* p = modrm + 1;
    uint64_t address = 0;
    bool is_relative = mode == 0 && base == 5, has_base = !is_relative;
    if (base == 4) {
        int scale = *p >> 6, index = (*p >> 3 & 7) | (rex & 2) << 2;
        base = *p++ & 7;
        has_base = mode != 0 || base != 5;
        if (index != 4) address += (uint64_t)registers[REGISTERS[index]] << scale;
        if (!has_base) mode = 2;
    }
    if (has_base) address += (uint64_t)registers[REGISTERS[base | (rex & 1) << 3]];
    if (mode == 1) address += (uint64_t)(int64_t)(int8_t)*p++;
    else if (mode == 2 || is_relative) {
        int32_t distance;
        memcpy(&distance, p, 4);
        address += (uint64_t)(int64_t)distance;
        p += 4;
    }
    if (is_relative) address += (uint64_t)p;
    *next = p;
    return (const char*)address;
}

bool simt_step(void* context) {
    if (!cast.steps) return false;
    auto* machine = &((ucontext_t*)context)->uc_mcontext;
    const uint8_t* code = (const uint8_t*)machine->gregs[REG_RIP];
    // cvttss2si and cvttsd2si: F3 or F2, perhaps a REX byte, 0F 2C, ModRM.
    const uint8_t* p = code;
    uint8_t prefix = *p, rex = 0;
    bool is_conversion = prefix == 0xf3 || prefix == 0xf2;
    if (is_conversion) {
        p++;
        if ((*p & 0xf0) == 0x40) rex = *p++;
        is_conversion = p[0] == 0x0f && p[1] == 0x2c;
    }
    if (is_conversion) {
        const uint8_t* modrm = p + 2;
        const uint8_t* next = modrm + 1;
        const char* from = (const char*)&machine->fpregs->_xmm[(*modrm & 7) | (rex & 1) << 3];
        if (*modrm >> 6 != 3) from = operand(machine->gregs, modrm, rex, &next);
        uint64_t source = 0;
        memcpy(&source, from, prefix == 0xf3 ? 4 : 8);
        bool is_wide = rex & 8;
        if (source == cast.source && is_wide == cast.is_wide) {
            int number = (*modrm >> 3 & 7) | (rex & 4) << 1;
            machine->gregs[REGISTERS[number]] = is_wide ? cast.result : (uint32_t)cast.result;
            machine->gregs[REG_RIP] = (greg_t)next;
            cast.steps = 1;
        }
    }
    if (--cast.steps == 0) machine->gregs[REG_EFL] &= ~TRAP_FLAG;
    return true;
}
#else
bool simt_step(void*) { return false; }
#endif
