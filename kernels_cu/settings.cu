// settings: numbers that the host has changed (learning rate, betas, max_norm, ...) go to device memory, by value: nothing is
// uploaded. The launch is not part of a captured step, which reads what this has written.

#ifndef MAX_VALUES
#define MAX_VALUES 256       // of one launch
#endif

struct Values { double value[MAX_VALUES]; };

extern "C" __global__ void settings_write(double* to, int count, Values values) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = values.value[i];
}
